"""The privacy report as a pure function of the evidence and the ledger.

account_privacy builds and signs it; the gate, the release and `fedemb verify` build it again from
the same evidence and compare field by field. So no number in it is ever trusted, and a field that
was nudged, dropped or added shows, whoever signed it.

Fields: dp.md 7, names spelled out. Sources: Ponomareva et al., How to DP-fy ML, 5.3.3; NIST SP
800-226.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any, Literal

from dp_accounting import NeighboringRelation

from fedemb.config import RunConfig
from fedemb.documents.artifacts import canonical_json, json_digest
from fedemb.documents.evidence import Evidence
from fedemb.errors import LedgerError
from fedemb.ledger.ledger import Ledger, Reservation, Spent
from fedemb.ledger.state import Attempt, LedgerState
from fedemb.privacy.accounting import accounting, loss_grid
from fedemb.privacy.accounting.events import event_from_json, event_to_json
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.reports.privacy_report_words import ASSUMPTIONS, LIMITATIONS, SAMPLERS, TRUST

SCHEMA = "fedemb/privacy_report/1"
CURVE_DELTAS = tuple(10.0**-exponent for exponent in range(3, 11))
"""Deltas of the curve, the policy's own apart."""


def build_report(
    evidence: Evidence, plan: MechanismPlan, ledger: Ledger, *, time: str, head_sequence: int
) -> dict[str, Any]:
    """Builds the unsigned report.

    Args:
      evidence: documents of the run.
      plan: mechanism, as compared with the configuration.
      ledger: verified ledger of the run's policy.
      time: when the report is made, UTC.
      head_sequence: last ledger record it takes into account.

    Raises:
      LedgerError: the ledger does not hold the reservation, or not its bind and commit, or ends
        before `head_sequence`.
      UnsupportedAccounting: the mechanism cannot be priced.
    """
    config, model = evidence.config, evidence.model.body
    body, apart = evidence.reservation.body, ("schema", "signature")
    reservation = Reservation.from_json({key: body[key] for key in body if key not in apart})
    attempt = ledger.attempt(reservation)
    if attempt.bind is None or attempt.commit is None:
        raise LedgerError(
            f"run {reservation.run_id!r} is {attempt.status} in the ledger, expected committed; "
            "let the training finish"
        )
    guarantee = priced(plan.event(), plan.relation, config.policy.delta)
    return {
        "schema": SCHEMA,
        "purpose": config.purpose,
        "run_id": reservation.run_id,
        "attempt": reservation.attempt,
        "time": time,
        "model_sha": model.get("weights_sha"),
        "guarantee": guarantee.to_json(),
        "setting": _setting(config, ledger, reservation, head_sequence),
        "unit": {
            "unit": "user",
            "identifiers": ledger.terms.identifiers,
            "multi_owner": "not covered",
            "population_lower_bound": config.policy.users_lower_bound,
            "exclusions": ["held-out evaluation users"],
        },
        "adjacency": {
            "relation": "add_or_remove_one_user",
            "accounting_relation": plan.relation.name,
            "covers_change_own_data": plan.relation is NeighboringRelation.REPLACE_ONE,
        },
        "mechanism": _mechanism(plan, attempt, model["key_injected"]),
        "accounting": _accounting(plan, guarantee),
        "cumulative": _cumulative(ledger, reservation, head_sequence),
        "tuning": {
            **config.tuning.model_dump(mode="json"),
            "other_runs_before": len(
                ledger.state.committed_runs(before=reservation.sequence) - {reservation.run_id}
            ),
        },
        "evaluation": {"data": "held-out users", "charged": False},
        "pretraining": _pretraining(config, evidence),
        "audit": _audit(evidence),
        "utility": _utility(evidence),
        "assumptions": ASSUMPTIONS,
        "limitations": LIMITATIONS,
        "approvals": [
            {**record.body, "sequence": record.sequence, "actor": record.actor}
            for record in ledger.state.waivers
            if record.sequence <= head_sequence
            and record.body["model_sha"] == model.get("weights_sha")
        ],
        "provenance": {
            "config_sha": reservation.config_sha,
            "code_sha": reservation.code_sha,
            "plan_sha": reservation.plan_sha,
            "inputs_sha": attempt.bind.body["inputs_sha"],
            "commitments": dict(attempt.bind.body["commitments"]),
            "input": reservation.input,
            "plan_document": evidence.plan.sha,
            "reservation_document": evidence.reservation.sha,
            "users_document": evidence.users.sha,
            "model_files": dict(evidence.model_files),
            "audit_document": evidence.audit.sha,
            "utility_document": evidence.utility.sha,
        },
    }


def priced(event: Any, relation: NeighboringRelation, delta: float) -> PrivacyGuarantee:
    """`accounting.price`, remembered: the same event is priced by several rules."""
    return _priced(canonical_json(event_to_json(event)), relation, delta, "auto")


def epsilon_rdp(plan: MechanismPlan, delta: float) -> float | None:
    """Epsilon by RDP where it is valid for the event; None elsewhere."""
    if not accounting.supports(plan.event(), plan.relation, "rdp"):
        return None
    event = canonical_json(event_to_json(plan.event()))
    return _finite(_priced(event, plan.relation, delta, "rdp").epsilon)


@functools.lru_cache(maxsize=256)
def _priced(
    event: bytes,
    relation: NeighboringRelation,
    delta: float,
    accountant: Literal["auto", "pld", "rdp"],
) -> PrivacyGuarantee:
    return accounting.price(event_from_json(json.loads(event)), relation, delta, accountant)


@functools.lru_cache(maxsize=64)
def _curve(event: bytes, relation: NeighboringRelation, delta: float) -> list[list[float]]:
    deltas = sorted({*CURVE_DELTAS, delta}, reverse=True)
    points = accounting.curve(event_from_json(json.loads(event)), relation, deltas)
    return [[at, epsilon] for at, epsilon in points if math.isfinite(epsilon)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _charged_until(ledger: Ledger, sequence: int, head_sequence: int) -> int:
    """Attempts reserved at a record or before that, and as of the head, weigh on their blocks."""
    return sum(
        attempt.reserve.sequence <= sequence and attempt.charge_after(head_sequence) is not None
        for attempt in ledger.state.attempts.values()
    )


def _setting(
    config: RunConfig, ledger: Ledger, reservation: Reservation, head_sequence: int
) -> dict[str, Any]:
    plan = ledger.terms.schedule
    return {
        "model": "central",
        "trust": TRUST,
        "releases": "final model only",
        "recurring": {
            "policy_id": reservation.policy_id,
            "run_index": _charged_until(ledger, reservation.sequence, head_sequence),
            "runs_planned": plan.runs if plan else None,
            "audit_level": config.policy.audit_level,
        },
    }


def _mechanism(plan: MechanismPlan, attempt: Attempt, key_injected: Any) -> dict[str, Any]:
    adaptive = plan.adaptive_clip
    commit: dict[str, Any] = dict(attempt.commit.body) if attempt.commit else {}
    matrix = None
    if plan.tracks_participation:
        matrix = {
            "sensitivity": plan.matrix_sensitivity,
            "min_separation": plan.min_separation,
            "max_participations": plan.max_participations,
            "buffers": len(plan.blt_decay) if plan.blt_decay else None,
            "restart_every": plan.restart_every,
        }
    return {
        "name": plan.kind,
        "plan_sha": plan.digest,
        "sampler": SAMPLERS[plan.kind],
        "sampling_probability": plan.sampling_probability,
        "virtual_clients": plan.virtual_clients,
        "groupings": plan.groupings,
        "grouping_rule": "keyed hash of the user id, fixed for the policy's life",
        "rounds_planned": plan.rounds,
        "rounds_run": commit.get("rounds_started"),
        "clip": {
            "kind": "one global L2 clip per virtual client",
            "l2_norm_clip": plan.l2_norm_clip,
            "adaptive": vars(adaptive).copy() if adaptive else None,
        },
        "noise_multiplier": plan.noise_multiplier,
        "noise": {
            "family": "Gaussian" if plan.private else "none",
            "generator": "ChaCha20, Box-Muller in float64",
            "key": "256 bits of entropy per attempt, bound to all inputs and to the exact sums",
            "grid_bits": plan.grid_bits,
            "secure": plan.private and key_injected is False,
        },
        "normaliser": {"rule": "a public constant", "value": plan.normaliser},
        "matrix": matrix,
    }


def _accounting(plan: MechanismPlan, guarantee: PrivacyGuarantee) -> dict[str, Any]:
    event = canonical_json(event_to_json(plan.event()))
    conservative = priced(plan.conservative_event(), plan.conservative_relation, guarantee.delta)
    return {
        "library": "dp-accounting",
        "version": accounting.library_version(),
        "accountant": guarantee.accountant,
        "discretisation": loss_grid.discretisation(plan.event()),
        "event": event_to_json(plan.event()),
        "rounds_priced": plan.rounds,
        "epsilon": _finite(guarantee.epsilon),
        "delta": guarantee.delta,
        "epsilon_conservative_2c": _finite(conservative.epsilon),
        "epsilon_rdp": epsilon_rdp(plan, guarantee.delta),
        "curve": _curve(event, plan.relation, guarantee.delta) if plan.private else [],
        "not_claimed": "the figure for adding or removing a whole virtual client (naive C)",
    }


def block_table(ledger: Ledger, head_sequence: int) -> dict[str, Spent]:
    """The price of every block as of a ledger record."""
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


def _cumulative(ledger: Ledger, reservation: Reservation, head_sequence: int) -> dict[str, Any]:
    terms = ledger.terms
    blocks = _blocks(ledger, head_sequence)
    table = [
        {"block": block, "epsilon": _finite(spent.epsilon), "runs": runs}
        for block, (spent, runs) in blocks.items()
        if block in reservation.blocks
    ]
    worst = max((blocks[block][0].epsilon for block in reservation.blocks), default=math.inf)
    return {
        "policy_id": ledger.policy_id,
        "blocks": table,
        "block_table_sha": json_digest(table),
        "max_block_epsilon": _finite(worst),
        "delta": terms.delta,
        "cap": terms.epsilon_cap,
        "filter": {
            "kind": terms.composition,
            "order": terms.renyi_order if terms.composition == "renyi" else None,
            "off_schedule": terms.off_schedule,
        },
        "ledger_sequence": head_sequence,
        "ledger_head": ledger.chain.records[head_sequence].sha,
    }


def _pretraining(config: RunConfig, evidence: Evidence) -> dict[str, Any]:
    kind = config.pretraining.kind
    overlap = {
        "none": "no public images",
        "import": "unchecked: the images of an imported backbone are unknown",
    }
    return {
        "kind": kind,
        "licence": config.pretraining.licence,
        "provenance": config.pretraining.provenance,
        "initial_weights_sha": evidence.model.body.get("initial_weights_sha"),
        "overlaps_private": overlap.get(kind, "dropped image by image by partition_users"),
    }


def _audit(evidence: Evidence) -> dict[str, Any]:
    audit = evidence.audit.body
    names = ("level", "attack", "model_sha", "code_sha", "figures", "auroc", "lower_bound")
    found = {name: audit[name] for name in (*names, "sentence", "planted_bug_suite")}
    return {**found, "self_test_passed": audit["self_test"]["passed"]}


def _utility(evidence: Evidence) -> dict[str, Any]:
    names = ("model_sha", "recall_at_far", "embedding_space_id", "sentence")
    return {name: evidence.utility.body.get(name) for name in names}
