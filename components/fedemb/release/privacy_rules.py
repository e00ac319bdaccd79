"""Rules about privacy: the records of the ledger, the plan and its price."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fedemb.documents.model import RoundLine
from fedemb.errors import SignatureInvalid
from fedemb.foundation.canonical_json import json_digest
from fedemb.ledger import Anchor, terms_of
from fedemb.ledger.records import check_record
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.prices import epsilon_rdp
from fedemb.privacy.registry import MECHANISMS
from fedemb.release.plan import document as plan_document
from fedemb.release.privacy_report import block_table, covers_change_own_data
from fedemb.release.rule import LATER_TOLERANCE, RELATIVE_TOLERANCE, Case, Charge, Rule, differences

_NEW_RUN = "start a run with a new id"
_TRAINED = "use the model artifact of the training step"


@Rule()
def report_unsigned(case: Case) -> Iterator[str]:
    """Report signed by a key trusted for reports at the time of signing."""
    case.ledger.chain.trust.check(case.signed, at=case.head)
    yield from ()


@Rule("run the step that writes it again, then what follows")
def document_unsigned(case: Case) -> Iterator[str]:
    """Every document signed by its step, with a key trusted for this run."""
    for document, at in case.evidence.trusted_at(case.reservation.sequence, case.head):
        try:
            case.ledger.chain.trust.check(document, at=at)
        except SignatureInvalid as error:
            yield str(error)


@Rule("restore the ledger")
def ledger_broken(case: Case) -> Iterator[str]:
    """Ledger intact, with the head of the report."""
    head = case.report.cumulative.ledger_head
    case.ledger.verify([Anchor(case.head, head, "the privacy report")])
    yield from ()


@Rule()
def report_before_commit(case: Case) -> Iterator[str]:
    """Report made after the training."""
    if case.attempt.commit is not None and not case.head >= case.attempt.commit.sequence:
        yield "the report was made before the training was committed"


@Rule("use the terms of the policy, or create a new policy")
def policy_differs(case: Case) -> Iterator[str]:
    """Configuration with the terms of the policy."""
    terms = case.ledger.terms
    asked = terms_of(case.config, terms.series)
    if not case.same_environment:  # a bundle does not contain the store addresses
        asked = replace(asked, rollback_anchor_sha=terms.rollback_anchor_sha)
    yield from terms.differences(asked)


def _fullest(case: Case) -> str:
    worst = max(case.ledger.spent(block).epsilon for block in case.reservation.blocks)
    return f"fullest block at epsilon {worst:.4g}"


@Rule(
    "use other blocks; no model of this block can be released",
    value=_fullest,
    limit=lambda case: f"epsilon at most {case.ledger.terms.epsilon_cap:g}",
)
def block_over_cap(case: Case) -> Iterator[str]:
    """Every user block within the cap, with all its runs."""
    cap, head = case.ledger.terms.epsilon_cap, case.head
    for block in case.reservation.blocks:
        for spent in (block_table(case.ledger, head)[block], case.ledger.spent(block)):
            if not spent.epsilon <= cap:
                yield f"block {block!r} has spent epsilon={spent.epsilon:.4g} of its cap {cap:g}"


@Rule(_NEW_RUN)
def reservation_invalid(case: Case) -> Iterator[str]:
    """Reservation signed and in the ledger."""
    check_record(case.evidence.reservation, case.ledger.chain.trust)
    case.ledger.attempt(case.reservation)
    yield from ()


@Rule("finish the training, which commits as its last act")
def not_committed(case: Case) -> Iterator[str]:
    """Training committed in the ledger."""
    attempt = case.attempt
    if attempt.void or attempt.bind is None or attempt.commit is None:
        yield case.uncommitted


@Rule("run again with purpose: release")
def simulation(case: Case) -> Iterator[str]:
    """Budget reserved for a release."""
    if case.reservation.purpose != "release" or case.config.purpose != "release":
        yield "the budget was reserved for a simulation, which can never be released"


@Rule("run again with the policy of the reservation")
def other_policy(case: Case) -> Iterator[str]:
    """Reservation of the configured policy."""
    if case.reservation.policy_id != case.config.policy.policy_id:
        yield "the reservation belongs to another policy than the configuration"


@Rule("run plan_privacy again, or use the plan of this run")
def plan_differs(case: Case) -> Iterator[str]:
    """Plan as computed again from the configuration, every figure in it."""
    found, made = case.evidence.plan.body, plan_document(case.config)
    tolerance = RELATIVE_TOLERANCE if case.same_environment else LATER_TOLERANCE
    if not case.same_environment:
        made = made.model_copy(update={"accounting_library": found.accounting_library})
    for path in differences(made.model_dump(), found.model_dump(), tolerance=tolerance):
        yield f"{path} of the plan differs from the value that the configuration gives"


@Rule(
    "release the artifacts of one run together; if something changed since the reservation, "
    + _NEW_RUN
)
def not_what_was_reserved(case: Case) -> Iterator[str]:
    """Configuration, plan, code, data and weights as reserved and bound."""
    evidence, reservation, bind = case.evidence, case.reservation, case.bind
    model, users, config = case.model, evidence.users.body, case.config.model
    bound: dict[str, tuple[object, object]] = {
        "model.run_id": (model.run_id, reservation.run_id),
        "model.attempt": (model.attempt, reservation.attempt),
        "model.config_sha": (model.config_sha, reservation.config_sha),
        "model.plan_sha": (model.plan_sha, reservation.plan_sha),
        "model.code_sha": (model.code_sha, reservation.code_sha),
        "model.inputs_sha": (model.inputs_sha, bind.inputs_sha),
        "model.backbone": (model.backbone, config.backbone),
        "model.embedding_dim": (model.embedding_dim, config.embedding_dim),
        "users.run_id": (users.run_id, reservation.run_id),
        "users.config_sha": (users.config_sha, reservation.config_sha),
        "users.reservation_sha": (users.reservation_sha, evidence.reservation.sha),
        "users.blocks": (sorted(users.blocks), sorted(reservation.blocks)),
        "users.virtual_clients": (users.virtual_clients, case.plan.virtual_clients),
        "users.groupings": (users.groupings, case.plan.groupings),
        "users.image_size": (users.image_size, config.image_size),
        "users.channels": (users.channels, config.channels),
        "plan.config_sha": (evidence.plan.body.config_sha, reservation.config_sha),
        "config_sha": (evidence.config_sha, reservation.config_sha),
        "plan.digest": (case.plan.digest, reservation.plan_sha),
        "users.commitments": (users.commitments.model_dump(), bind.commitments),
    }
    for name, (found, wanted) in bound.items():
        if found != wanted:
            yield f"{name} differs from the reservation of run {reservation.run_id!r}"


@Rule(_NEW_RUN)
def inputs_differ(case: Case) -> Iterator[str]:
    """Inputs of the training as bound before round 0."""
    inputs = {
        "plan_sha": case.reservation.plan_sha,
        "config_sha": case.reservation.config_sha,
        "initial_weights_sha": case.model.initial_weights_sha,
        "data_commitment": case.evidence.users.body.commitments.users,
        "code_sha": case.reservation.code_sha,
    }
    if json_digest(inputs) != case.bind.inputs_sha:
        yield (
            "the digest of all inputs differs from that of plan, configuration, initial weights, "
            "data commitment and code"
        )


@Rule(f"{_NEW_RUN} that reserves all its rounds")
def more_rounds_than_reserved(case: Case) -> Iterator[str]:
    """Only reserved rounds run and committed."""
    started, ran, reserved = case.commit.rounds_started, case.model.rounds_run, case.reservation
    if not ran <= started <= reserved.rounds == case.plan.rounds:
        yield (
            f"the model was trained for {ran} rounds, but {started} rounds were committed and "
            f"{reserved.rounds} reserved"
        )


@Rule(
    "run all planned rounds",
    waivable=True,
    value=lambda case: f"{case.model.rounds_run} run, {case.commit.rounds_started} committed",
    limit=lambda case: f"{case.plan.rounds} planned",
)
def stopped_early(case: Case) -> Iterator[str]:
    """All planned rounds run."""
    started, ran, planned = case.commit.rounds_started, case.model.rounds_run, case.plan
    if not ran == started == planned.rounds:
        yield (
            f"the training stopped after {ran} of {planned.rounds} planned rounds, {started} of "
            "them committed; private data may have decided when to stop"
        )


@Rule(f"resume the training, or {_NEW_RUN}")
def round_log_incomplete(case: Case) -> Iterator[str]:
    """Each committed round logged once, in order."""
    if [line.round for line in case.evidence.rounds] != list(range(case.commit.rounds_started)):
        yield "the round log does not list each committed round once, in order"


@Rule(_TRAINED)
def round_log_changed(case: Case) -> Iterator[str]:
    """Round log as signed at commit."""
    if case.commit.round_log["sha"] != case.evidence.model_files["rounds.jsonl"]:
        yield "the round log differs from the one that the trainer signed at commit"


@Rule(_NEW_RUN)
def round_line_differs(case: Case) -> Iterator[str]:
    """Each line of the round log as planned."""
    plan = case.plan
    for index, line in enumerate(case.evidence.rounds):
        expected = public_line(plan, index, line.output_sha)
        if differences(expected.model_dump(), line.model_dump(), tolerance=0.0):
            yield (
                f"line {index} of the round log must have exactly the round number, the planned "
                "clients, the planned event and the digest of the noised output of its round"
            )


def public_line(plan: MechanismPlan, index: int, output_sha: str) -> RoundLine:
    """Returns the public log line that the trainer writes for a round; see `RoundLog.commit`."""
    priced_alone = not plan.tracks_participation
    return RoundLine(
        round=index,
        clients_planned=plan.normalizer,
        output_sha=output_sha,
        event=event_to_json(plan.round_event) if priced_alone else None,
    )


RDP_TOLERANCE = 0.02
"""Maximum share by which PLD may exceed RDP, for its discretisation; a larger gap is a bug."""


@Rule(f"use another mechanism; {next(iter(MECHANISMS))} is the default").before_charge
def no_proof(charge: Charge) -> Iterator[str]:
    """Mechanism with a proven guarantee."""
    plan = charge.plan
    if not (plan.private and plan.proof):
        yield f"mechanism {plan.kind} under {plan.relation.name} has no proven guarantee"


@Rule(_NEW_RUN)
def event_differs(case: Case) -> Iterator[str]:
    """Event and neighbouring relation charged as recomputed."""
    event, relation = event_to_json(case.plan.event()), case.plan.relation.name
    if (case.reservation.event, case.reservation.relation) != (event, relation):
        yield "the reservation charged another event or neighbouring relation than recomputed"


@Rule(
    "use group_poisson_gaussian, hold users out by hash and set no cohort column, or create a "
    "policy with covers_change_own_data: false",
    applies=lambda case: case.config.policy.covers_change_own_data,
).before_charge
def change_not_covered(charge: Charge) -> Iterator[str]:
    """Guarantee for users who change their own data, as promised."""
    promised = charge.config.policy.covers_change_own_data
    if promised and not covers_change_own_data(charge.config, charge.plan):
        yield (
            "policy.covers_change_own_data is true, but epsilon does not hold for users who change "
            "their own data"
        )


@Rule(
    "lower policy.delta and create a new policy",
    value=lambda case: f"delta {case.config.policy.delta:g}",
    limit=lambda case: f"below 1/{case.ledger.terms.users_lower_bound}",
).before_charge
def delta_too_large(charge: Charge) -> Iterator[str]:
    """Delta of the policy, below one over the number of users."""
    delta, terms = charge.config.policy.delta, charge.ledger.terms
    if not (0 < delta < 1 / terms.users_lower_bound) or delta != terms.delta:
        yield f"delta={delta:g} is not below 1/{terms.users_lower_bound}, or not the policy's"


@Rule("create a new policy with a lower policy.delta", waivable=True).before_charge
def delta_above_customary(charge: Charge) -> Iterator[str]:
    """Delta of the customary size, users_lower_bound^-1.1."""
    delta, customary = charge.config.policy.delta, charge.ledger.terms.users_lower_bound**-1.1
    if not delta <= customary:
        yield f"delta={delta:g} is above users_lower_bound**-1.1={customary:.3g}"


@Rule("use a mechanism with noise").before_charge
def no_privacy(charge: Charge) -> Iterator[str]:
    """Epsilon above 0 and finite."""
    epsilon = charge.guarantee.epsilon
    if not 0 < epsilon < math.inf:
        yield f"epsilon is {epsilon}, which guarantees nothing"


@Rule()
def epsilon_differs(case: Case) -> Iterator[str]:
    """Epsilon of the report as recomputed."""
    epsilon, claimed = case.charge.guarantee.epsilon, case.report.accounting.epsilon
    if not (claimed is not None and abs(claimed - epsilon) <= 0.01 * epsilon):
        yield f"the report has epsilon={claimed}, but the recomputed value is {epsilon:.6g}"


@Rule(
    "raise noise_multiplier, lower rounds or sampling_probability",
    value=lambda case: f"epsilon {case.charge.guarantee.epsilon:.4g}",
    limit=lambda case: f"at most {case.ledger.terms.epsilon_cap:g}",
).before_charge
def epsilon_above_cap(charge: Charge) -> Iterator[str]:
    """Epsilon of this run within the cap."""
    epsilon, policy = charge.guarantee.epsilon, charge.config.policy
    cap = charge.ledger.terms.epsilon_cap
    if not epsilon <= cap:
        yield (
            f"epsilon={epsilon:.4g} at delta={policy.delta:g} is above the cap {cap:g} of policy "
            f"{policy.policy_id!r}"
        )


@Rule(
    "report this as a bug of the accounting",
    applies=lambda case: case.charge.guarantee.accountant == "pld",
).before_charge
def accountants_disagree(charge: Charge) -> Iterator[str]:
    """Epsilon by PLD, the tighter bound, not above that by RDP."""
    guarantee, renyi = charge.guarantee, epsilon_rdp(charge.plan, charge.config.policy.delta)
    upper = math.inf if renyi is None else renyi
    if guarantee.accountant == "pld" and not upper >= (1 - RDP_TOLERANCE) * guarantee.epsilon:
        yield f"epsilon by RDP is {renyi}, below {guarantee.epsilon:.4g} by PLD"


@Rule(
    "tune under this policy, or on public images",
    applies=lambda case: case.config.tuning.private_runs != 0,
).before_charge
def tuning_not_charged(charge: Charge) -> Iterator[str]:
    """Private runs that chose the hyperparameters charged."""
    runs = charge.config.tuning.private_runs
    if not runs <= charge.other_runs:
        yield (
            f"{runs} private runs were compared to choose the hyperparameters, but the ledger "
            f"has {charge.other_runs} other runs before this one"
        )
