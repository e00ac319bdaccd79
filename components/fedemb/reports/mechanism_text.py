"""Report text of each mechanism.

The classes of `fedemb.privacy.mechanisms` contain only mathematics. To add a mechanism, add an
entry to `TEXTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Never, TypeVar, cast

from fedemb.privacy.mechanisms.capped_image_poisson import CappedImagePoisson
from fedemb.privacy.mechanisms.covariance import Covariance
from fedemb.privacy.mechanisms.group_poisson_gaussian import GroupPoissonGaussian
from fedemb.privacy.mechanisms.least_squares import LeastSquares
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.not_private import NotPrivate
from fedemb.privacy.mechanisms.poisson_gaussian import PoissonGaussian
from fedemb.privacy.mechanisms.tree_aggregation import TreeAggregation

P_contra = TypeVar("P_contra", bound=MechanismPlan, contravariant=True)


def _virtual_clients(plan: MechanismPlan) -> str:
    clients = f"{plan.normalizer:.4g} of {plan.virtual_clients:,} virtual clients a round"
    return clients + (f" (probability {plan.chance:.4g})" if plan.chance else " in turn")


@dataclass(frozen=True, kw_only=True)
class MechanismText(Generic[P_contra]):
    """Text of one mechanism."""

    sampler: str
    """Participants of a round, for the privacy report."""
    participants: Callable[[P_contra], str] = _virtual_clients
    """Returns the participants of a round, on one line."""


def _units(plan: PoissonGaussian) -> str:
    if plan.sampling_probability == 1:
        return f"every {plan.unit} in every round (full batch)"
    return (
        f"about {plan.units_per_round:,} {plan.unit}s a round (probability "
        f"{plan.sampling_probability:.4g})"
    )


TEXTS: dict[str, MechanismText[Never]] = {
    "group_poisson_gaussian": MechanismText[GroupPoissonGaussian](
        sampler="each virtual client independently with the sampling probability",
    ),
    "poisson_gaussian": MechanismText[PoissonGaussian](
        sampler="each unit independently with the sampling probability",
        participants=_units,
    ),
    "capped_image_poisson": MechanismText[CappedImagePoisson](
        sampler="each image independently with the sampling probability, at most m of a user",
        participants=lambda plan: (
            f"about {plan.images_per_round:,} images a round (probability "
            f"{plan.sampling_probability:.4g}), at most {plan.images_per_user} of a user"
        ),
    ),
    "least_squares": MechanismText[LeastSquares](
        sampler="every unit, in the only round",
        participants=lambda plan: (
            f"every {plan.unit}, about {plan.units_per_round:,}, in one round"
        ),
    ),
    "covariance": MechanismText[Covariance](
        sampler="every user, in the only round",
        participants=lambda plan: f"every user, about {plan.units_per_round:,}, in one round",
    ),
    "tree_aggregation": MechanismText[TreeAggregation](
        sampler="every virtual client in a fixed order, with bounded participation",
    ),
    "not_private": MechanismText[NotPrivate](
        sampler="each virtual client independently with the sampling probability",
    ),
}
"""By kind of the mechanism."""


def participants(plan: MechanismPlan) -> str:
    """Returns the participants of a round of a plan, on one line."""
    text = cast("MechanismText[MechanismPlan]", TEXTS[plan.kind])  # the kind names the plan's class
    return text.participants(plan)


def comparison(plan: MechanismPlan, name: str) -> str:
    """Returns the label of a comparison figure of a plan; see `MechanismPlan.comparisons`."""
    if name == "users_sampled":
        return "epsilon if whole users were sampled, same noise on the mean"
    images = plan.images_per_unit if isinstance(plan, PoissonGaussian) else 1
    return f"epsilon if images were sampled, at most {images} of a user, same noise on the mean"
