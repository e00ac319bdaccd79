"""Builds the privacy report of a run from its evidence and the ledger."""

from __future__ import annotations

import math

from fedemb.config import RunConfig
from fedemb.documents.evidence import Evidence
from fedemb.documents.ledger_record import BindRecord
from fedemb.documents.privacy_report import Audited, PrivacyReport
from fedemb.errors import LedgerError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.ledger import Ledger, Reservation, Spent
from fedemb.ledger.records import Record
from fedemb.ledger.state import Attempt, LedgerState
from fedemb.privacy import accounting
from fedemb.privacy.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.prices import epsilon_rdp, finite, guarantee_of


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
        "recurring": _recurring(config, ledger, reservation, head_sequence),
        "unit": {
            "unit": plan.unit,
            "population_lower_bound": config.policy.users_lower_bound,
            "held_out_share": getattr(config.partition.evaluation, "fraction", None),
        },
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
        "pretraining": _pretraining(config, evidence),
        "audit": evidence.audit.body.model_dump(include=set(Audited.model_fields)),
        "waivers": [
            {"code": code, "model_sha": model.weights_sha, "sequence": record.sequence}
            for code, record in ledger.state.waivers_of(model.weights_sha, head_sequence).items()
        ],
        "release": _release_terms(config, reservation.run_id),
        "provenance": _provenance(evidence, reservation, attempt.bind),
    }
    return PrivacyReport.of_fields(fields)


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
    return {
        "licence_sha": sha256_hex(config.release.licence.encode()),
        "min_gain_over_public": config.release.min_gain_over_public,
        "no_worse_than": config.release.no_worse_than,
        "approval_hours": config.release.approval_hours,
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
        attempt.reserve.sequence <= sequence and attempt.charged_at(head_sequence)
        for attempt in ledger.state.attempts.values()
    )


def _recurring(
    config: RunConfig, ledger: Ledger, reservation: Reservation, head_sequence: int
) -> dict[str, object]:
    plan = ledger.terms.series
    return {
        "policy_id": reservation.policy_id,
        "run_index": _charged_until(ledger, reservation.sequence, head_sequence),
        "runs_planned": plan.runs if plan else None,
    }


def _mechanism(plan: MechanismPlan, attempt: Attempt, key_injected: bool) -> dict[str, object]:
    commit: dict[str, object] = dict(attempt.commit.body) if attempt.commit else {}
    return {
        "name": plan.kind,
        "sampling_probability": plan.chance,
        "virtual_clients": plan.virtual_clients,
        "groupings": plan.groupings,
        "grouping_rule": "each_unit_alone" if plan.samples_units else "keyed_hash_of_user_id",
        "rounds_planned": plan.rounds,
        "rounds_run": commit.get("rounds_started"),
        "l2_norm_clip": plan.l2_norm_clip,
        "noise_multiplier": plan.noise_multiplier,
        "noise_secure": plan.private and key_injected is False,
        "normalizer": plan.normalizer,
    }


def _accounting(plan: MechanismPlan, guarantee: PrivacyGuarantee) -> dict[str, object]:
    return {
        "library": "dp-accounting",
        "version": accounting.library_version(),
        "accountant": guarantee.accountant,
        "epsilon": finite(guarantee.epsilon),
        "delta": guarantee.delta,
        "epsilon_rdp": epsilon_rdp(plan, guarantee.delta) if plan.private else None,
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
        "max_block_epsilon": finite(worst),
        "delta": terms.delta,
        "cap": terms.epsilon_cap,
        "filter": {
            "kind": terms.composition,
            "order": terms.renyi_order if terms.composition == "renyi" else None,
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
