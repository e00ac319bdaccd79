"""Checks whether a guarantee also covers users who change their own data and stay."""

from __future__ import annotations

import math

from fedemb.config import RunConfig
from fedemb.documents.evidence import Evidence
from fedemb.documents.ledger_record import BindRecord
from fedemb.documents.privacy_report import (
    TRUST,
    Audited,
    PrivacyReport,
    Useful,
    assumptions,
    limitations,
)
from fedemb.documents.utility import UtilityReport
from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import json_digest, sha256_hex
from fedemb.ledger import Ledger, Reservation, Spent
from fedemb.ledger.records import Record
from fedemb.ledger.state import Attempt, LedgerState
from fedemb.privacy import accounting, losses
from fedemb.privacy.guarantee import PrivacyGuarantee, event_to_json
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.prices import figures, finite, guarantee_of, privacy_curve


def covers_change_own_data(config: RunConfig, plan: MechanismPlan) -> bool:
    """Returns whether the epsilon of a run holds for a user who changes all of their own data.

    Two conditions must hold. The event must price a replaced update. The change must not move the
    user to another group: if a column decides who is held out, a new value can move a user into the
    exactly evaluated set, and if a column names the cohort, a new value charges a second block.
    """
    stays = config.partition.evaluation.by == "hash" and config.data.source.columns.cohort is None
    return stays and plan.relation.name == "REPLACE_ONE"


def build_report(
    evidence: Evidence, plan: MechanismPlan, ledger: Ledger, *, time: str, head_sequence: int
) -> PrivacyReport:
    """Builds the report as of a record of a verified ledger; `time` is the UTC time of the record.

    Raises:
      LedgerError: the ledger lacks the reservation, its bind or its commit, or ends before
          `head_sequence`.
      UnsupportedAccounting: the mechanism has no valid accountant.
    """
    config, model = evidence.config, evidence.model.body
    reservation = Reservation.of(evidence.reservation)
    attempt = ledger.attempt(reservation)
    if attempt.bind is None or attempt.commit is None:
        raise LedgerError(
            f"run {reservation.run_id!r} is {attempt.status} in the ledger, expected committed; "
            "let the training finish"
        )
    guarantee = guarantee_of(plan, config.policy.delta)
    fields: dict[str, object] = {
        "purpose": config.purpose,
        "run_id": reservation.run_id,
        "attempt": reservation.attempt,
        "time": time,
        "model_sha": model.weights_sha,
        "guarantee": guarantee.to_json(),
        "setting": _setting(config, ledger, reservation, head_sequence),
        "unit": _unit(config, plan),
        "adjacency": {
            "relation": f"add_or_remove_one_{plan.unit}",
            "accounting_relation": plan.relation.name,
            "covers_change_own_data": covers_change_own_data(config, plan),
        },
        "mechanism": {
            **_mechanism(plan, attempt, model.key_injected),
            "plan_sha": plan.digest,
            "backend": evidence.plan.body.backend,
        },
        "accounting": _accounting(plan, guarantee),
        "cumulative": _cumulative(ledger, reservation, head_sequence),
        "tuning": _tuning(config, ledger, reservation),
        "evaluation": {"data": "held_out_users", "charged": False},
        "pretraining": _pretraining(config, evidence),
        "audit": evidence.audit.body.model_dump(include=set(Audited.model_fields)),
        "utility": _utility(evidence),
        "assumptions": list(assumptions(plan.unit)),
        "limitations": list(limitations(plan.unit)),
        "waivers": [
            {"code": code, "model_sha": model.weights_sha, "sequence": record.sequence}
            for code, record in ledger.state.waivers_of(model.weights_sha, head_sequence).items()
        ],
        "release": _release_terms(config, reservation.run_id),
        "provenance": _provenance(evidence, reservation, attempt.bind),
    }
    return PrivacyReport.of_fields(fields)


def _unit(config: RunConfig, plan: MechanismPlan) -> dict[str, object]:
    return {
        "unit": plan.unit,
        "multi_owner": "not_covered",
        "population_lower_bound": config.policy.users_lower_bound,
        "exclusions": ["evaluation_users"],
        "held_out_share": getattr(config.partition.evaluation, "fraction", None),
    }


def _tuning(config: RunConfig, ledger: Ledger, reservation: Reservation) -> dict[str, object]:
    state, sequence = ledger.state, reservation.sequence
    return {
        "data": config.tuning.data,
        "private_runs": config.tuning.private_runs,
        "other_runs_before": len(state.committed_runs(before=sequence) - {reservation.run_id}),
        "simulations_before": len(state.simulations(before=sequence)),
    }


def _release_terms(config: RunConfig, run_id: str) -> dict[str, object]:
    name, version = config.released_as(run_id)
    despite = config.release.train_despite_noise
    return {
        "licence_sha": sha256_hex(config.release.licence.encode()),
        "min_gain_over_public": config.release.min_gain_over_public,
        "no_worse_than": config.release.no_worse_than,
        "approval_hours": config.release.approval_hours,
        "train_despite_noise_sha": sha256_hex(despite.encode()) if despite else None,
        "name": name,
        "version": version,
    }


def _provenance(evidence: Evidence, reservation: Reservation, bind: Record) -> dict[str, object]:
    bound = bind.content(BindRecord)
    return {
        "config_sha": reservation.config_sha,
        "code_sha": reservation.code_sha,
        "plan_sha": reservation.plan_sha,
        "inputs_sha": bound.inputs_sha,
        "commitments": bound.commitments,
        "input": reservation.input,
        "plan_document": evidence.plan.sha,
        "reservation_document": evidence.reservation.sha,
        "users_document": evidence.users.sha,
        "model_files": dict(evidence.model_files),
        "audit_document": evidence.audit.sha,
        "utility_document": evidence.utility.sha,
    }


def _charged_until(ledger: Ledger, sequence: int, head_sequence: int) -> int:
    """Returns the attempts reserved up to a record that are charged as of the head."""
    return sum(
        attempt.reserve.sequence <= sequence and attempt.charge_after(head_sequence) is not None
        for attempt in ledger.state.attempts.values()
    )


def _setting(
    config: RunConfig, ledger: Ledger, reservation: Reservation, head_sequence: int
) -> dict[str, object]:
    plan = ledger.terms.series
    return {
        "model": "central",
        "trust": list(TRUST),
        "releases": "final_model_only",
        "recurring": {
            "policy_id": reservation.policy_id,
            "run_index": _charged_until(ledger, reservation.sequence, head_sequence),
            "runs_planned": plan.runs if plan else None,
            "audit_level": config.policy.audit_level,
        },
    }


def _mechanism(plan: MechanismPlan, attempt: Attempt, key_injected: bool) -> dict[str, object]:
    commit: dict[str, object] = dict(attempt.commit.body) if attempt.commit else {}
    grouped = not plan.samples_units
    clipped = "virtual_client" if grouped else "image" if plan.samples_images else "unit"
    return {
        "name": plan.kind,
        "sampling_probability": plan.chance,
        "virtual_clients": plan.virtual_clients,
        "groupings": plan.groupings,
        "grouping_rule": "keyed_hash_of_user_id" if grouped else "each_unit_alone",
        "rounds_planned": plan.rounds,
        "rounds_run": commit.get("rounds_started"),
        "clip": {
            "kind": f"global_l2_per_{clipped}",
            "l2_norm_clip": plan.l2_norm_clip,
        },
        "noise_multiplier": plan.noise_multiplier,
        "noise": {
            "family": "gaussian" if plan.private else "none",
            "generator": "chacha20_box_muller_float64",
            "key": "256_bits_per_attempt_bound_to_inputs_and_sums",
            "grid_bits": plan.grid_bits,
            "secure": plan.private and key_injected is False,
        },
        "normalizer": {"rule": "public_constant", "value": plan.normalizer},
        "matrix": plan.matrix(),
    }


def _accounting(plan: MechanismPlan, guarantee: PrivacyGuarantee) -> dict[str, object]:
    return {
        "library": "dp-accounting",
        "version": accounting.library_version(),
        "accountant": guarantee.accountant,
        "discretisation": losses.discretisation(plan.event()),
        "event": event_to_json(plan.event()),
        "rounds_priced": plan.rounds,
        "epsilon": finite(guarantee.epsilon),
        "delta": guarantee.delta,
        **figures(plan, guarantee.delta),
        "curve": privacy_curve(plan, guarantee.delta),
    }


def block_table(ledger: Ledger, head_sequence: int) -> dict[str, Spent]:
    """Returns the cumulative privacy loss of every block as of a ledger record."""
    return {block: spent for block, (spent, _) in _blocks(ledger, head_sequence).items()}


def _blocks(ledger: Ledger, head_sequence: int) -> dict[str, tuple[Spent, int]]:
    if not 0 <= head_sequence < len(ledger.chain.records):
        raise LedgerError(
            f"the ledger ends at record {len(ledger.chain.records) - 1}, expected at least "
            f"{head_sequence}; its tail was cut, restore it from its backup"
        )
    state = LedgerState()
    state.replay(ledger.chain.records[: head_sequence + 1], None)
    return {
        block: (state.spent(block), len(state.charges(block))) for block in sorted(state.by_block)
    }


def _cumulative(ledger: Ledger, reservation: Reservation, head_sequence: int) -> dict[str, object]:
    terms = ledger.terms
    blocks = _blocks(ledger, head_sequence)
    table = [
        {"block": block, "epsilon": finite(spent.epsilon), "runs": runs}
        for block, (spent, runs) in blocks.items()
        if block in reservation.blocks
    ]
    worst = max((blocks[block][0].epsilon for block in reservation.blocks), default=math.inf)
    return {
        "policy_id": ledger.policy_id,
        "blocks": table,
        "block_table_sha": json_digest(table),
        "max_block_epsilon": finite(worst),
        "delta": terms.delta,
        "cap": terms.epsilon_cap,
        "filter": {
            "kind": terms.composition,
            "order": terms.renyi_order if terms.composition == "renyi" else None,
            "unplanned_runs": terms.unplanned_runs,
        },
        "ledger_sequence": head_sequence,
        "ledger_head": ledger.chain.records[head_sequence].sha,
    }


def _pretraining(config: RunConfig, evidence: Evidence) -> dict[str, object]:
    kind, overlap = config.pretraining.kind, {"none": "no_public_images", "import": "unchecked"}
    return {
        "kind": kind,
        "initial_weights_sha": evidence.model.body.initial_weights_sha,
        "overlaps_private": overlap.get(kind, "dropped_by_partition_users"),
    }


def _utility(evidence: Evidence) -> dict[str, object]:
    utility = evidence.utility.body
    if isinstance(utility, UtilityReport):
        return utility.model_dump(include=set(Useful.model_fields))
    top_1 = utility.headline()
    return {"model_sha": utility.model_sha, "top_1": top_1 and top_1.model_dump()}
