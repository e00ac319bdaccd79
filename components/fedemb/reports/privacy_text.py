"""Text of a guarantee: its sentence, the meaning of its epsilon, and the participants of a round.

The classes of mechanisms contain only mathematics. To add a mechanism, add an
entry to `PARTICIPANTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Never, cast

from fedemb.documents.fields import Guarantee
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.environment import Backend
from fedemb.privacy.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.section import UNITS
from fedemb.privacy.unit_mechanisms import CappedImagePoisson, Covariance, PoissonGaussian
from fedemb.reports.report import significant

if TYPE_CHECKING:
    from fedemb.config import PretrainingConfig

BACKENDS: dict[Backend, str] = {"tensorflow": "TensorFlow", "jax": "JAX"}


OVERLAPS = {
    "no_public_images": "no public images",
    "unchecked": "unchecked: the images of an imported backbone are unknown",
    "dropped_by_partition_users": "dropped by partition_users",
}


def backbone_licence(pretraining: PretrainingConfig) -> str:
    """Returns the licence of the pretraining images, as stated by the configuration's owner."""
    drawn = pretraining.kind == "none"
    unstated = pretraining.licence == type(pretraining)().licence
    return "none needed" if drawn and unstated else pretraining.licence


def guarantee_sentence(guarantee: Guarantee) -> str:
    """Returns the guarantee of a plan or report as one sentence."""
    return str(PrivacyGuarantee.from_json(guarantee.model_dump()))


def report_sentence(report: PrivacyReport) -> str:
    """Returns the guarantee of a report as one sentence, with covered and uncovered users."""
    unit, share = report.unit.unit, report.unit.held_out_share
    covered = "also covered is" if report.adjacency.covers_change_own_data else "not covered is"
    change, many = UNITS[unit].change, UNITS[unit].many
    held_out = f"about {share:.3g} of all {many}" if share else "those with the held-out values"
    return (
        f"{guarantee_sentence(report.guarantee)}; {covered} one {unit} that {change}; "
        f"{many} held out for evaluation ({held_out}) are measured exactly and have no guarantee"
    )


def all_runs(report: PrivacyReport) -> str | None:
    """Returns the total privacy loss of all charges; None for the first charge on all blocks.

    The loss is that of the fullest block that this run trained on. Other blocks are in the reports
    of other runs.
    """
    cumulative, many = report.cumulative, UNITS[report.unit.unit].many
    charges = max((row.runs for row in cumulative.blocks), default=0)
    if charges < 2:
        return None
    epsilon = cumulative.max_block_epsilon
    spent = "no finite epsilon" if epsilon is None else f"epsilon {epsilon:.4g}"
    blocks = "" if len(cumulative.blocks) == 1 else ", for those of the fullest block"
    return (
        f"all {charges} charges of policy {cumulative.policy_id!r} on these {many} together: "
        f"{spent} of the cap {cumulative.cap:g} at delta {cumulative.delta:g}{blocks}"
    )


def attack_rates(
    plan: MechanismPlan, guarantee: PrivacyGuarantee | Guarantee
) -> list[tuple[float, float]]:
    """Returns (share of wrong guesses, highest share found by any attacker), rounded up.

    Empty without a finite epsilon.
    """
    from fedemb.privacy.prices import plan_attack_rates, rounded_up

    epsilon = guarantee.epsilon
    if not plan.private or epsilon is None or not math.isfinite(epsilon):
        return []
    return [(rate, min(1.0, rounded_up(found))) for rate, found in plan_attack_rates(plan)]


def meaning(plan: MechanismPlan, guarantee: PrivacyGuarantee | Guarantee) -> str | None:
    """Returns the meaning of a run's guarantee for a reader who is not a specialist.

    Every figure is rounded up. Returns None without a finite epsilon.
    """
    rates, many = attack_rates(plan, guarantee), UNITS[plan.unit].many
    if not rates:
        return None
    (rate, found), *rest = rates
    others = ", ".join(f"{percent(found)} at {percent(rate)}" for rate, found in rest)
    return (
        f"An attacker whose guesses are wrong for at most {percent(rate)} of the {many} outside "
        f"the training data finds at most {percent(found)} of the {many} in it ({others}), "
        "whatever it knows."
    )


def percent(share: float) -> str:
    """Returns a share in percent, without further rounding of three digits.

    >>> percent(0.01), percent(0.0413), percent(0.0001)
    ('1 %', '4.13 %', '0.01 %')
    """
    return f"{100 * share:.12g} %"


def _virtual_clients(plan: MechanismPlan) -> str:
    clients = f"{plan.normalizer:.4g} of {plan.virtual_clients:,} virtual clients a round"
    return clients + (f" (probability {plan.chance:.4g})" if plan.chance else " in turn")


def _units(plan: PoissonGaussian) -> str:
    if plan.sampling_probability == 1:
        return f"every {plan.unit} in every round (full batch)"
    return (
        f"about {plan.units_per_round:,} {plan.unit}s a round (probability "
        f"{plan.sampling_probability:.4g})"
    )


def _images(plan: CappedImagePoisson) -> str:
    return (
        f"about {plan.images_per_round:,} images a round (probability "
        f"{plan.sampling_probability:.4g}), at most {plan.images_per_user} of a user"
    )


def _all_units(plan: Covariance) -> str:
    return f"every {plan.unit}, about {plan.units_per_round:,}, in one round"


PARTICIPANTS: dict[str, Callable[[Never], str]] = {
    "group_poisson_gaussian": _virtual_clients,
    "tree_aggregation": _virtual_clients,
    "poisson_gaussian": _units,
    "capped_image_poisson": _images,
    "covariance": _all_units,
}
"""By kind of the mechanism."""


def participants(plan: MechanismPlan) -> str:
    """Returns the participants of a round of a plan, on one line."""
    # The kind names the plan's class.
    text = cast("Callable[[MechanismPlan], str]", PARTICIPANTS[plan.kind])
    return text(plan)


def protection(report: PrivacyReport) -> str:
    """Returns the guarantee of a release in at most 25 words."""
    unit, found = UNITS[report.unit.unit], report.accounting
    if found.epsilon is None:
        return f"No guarantee: epsilon of one {unit.one} is infinite."
    return (
        f"Every {unit.one} in the training data is protected with epsilon "
        f"{significant(found.epsilon)} at delta {significant(found.delta)}, {unit.reach}."
    )


def guarantee_lines(report: PrivacyReport | None, plan: PrivacyPlan | None) -> list[str]:
    """Returns the guarantee of a run in at most 25 words, then its full text."""
    if report is not None and report.purpose == "release":
        rest = filter(None, (report_sentence(report), all_runs(report)))
        return [protection(report), f"{'; '.join(rest)}."]
    if plan is None:
        return ["none (nothing was planned)"]
    if plan.purpose == "simulation":
        many = UNITS[plan.guarantee.unit].many
        projections = ", ".join(
            f"{'infinite' if item.epsilon is None else f'{item.epsilon:.3g}'} at "
            f"{item.population:,} {many}"
            for item in plan.projections
        )
        return ["none (simulation)" + (projections and f"; projected epsilon: {projections}")]
    planned = f"planned: {guarantee_sentence(plan.guarantee)}"
    return ["none yet (the run ended before account_privacy)", planned]
