"""Presentation of each mechanism: report text, and style of its curve in figures.

The classes of `fedemb.privacy.mechanisms` contain only mathematics. To add a mechanism, add an
entry to `TEXTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Never, TypeVar, cast

from fedemb.privacy.mechanisms.blt import Blt
from fedemb.privacy.mechanisms.capped_image_poisson import CappedImagePoisson
from fedemb.privacy.mechanisms.covariance import Covariance
from fedemb.privacy.mechanisms.fixed_size import FixedSize
from fedemb.privacy.mechanisms.group_poisson_gaussian import GroupPoissonGaussian
from fedemb.privacy.mechanisms.grouped_users import GroupedUsers
from fedemb.privacy.mechanisms.least_squares import LeastSquares
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.not_private import NotPrivate
from fedemb.privacy.mechanisms.per_unit_sampling import PerUnitSampling
from fedemb.privacy.mechanisms.poisson_gaussian import PoissonGaussian
from fedemb.privacy.mechanisms.random_allocation import RandomAllocation
from fedemb.privacy.mechanisms.round_robin import RoundRobinPlan
from fedemb.privacy.mechanisms.tree_aggregation import TreeAggregation
from fedemb.privacy.mechanisms.user_poisson import UserPoisson

P = TypeVar("P", bound=MechanismPlan)
P_contra = TypeVar("P_contra", bound=MechanismPlan, contravariant=True)
Dash = str | tuple[int, tuple[int, ...]]
"""Line style of matplotlib."""


def _user_adjacency(plan: MechanismPlan) -> str:
    del plan
    return (
        "Adjacency. Two data sets that differ in the presence of one user with all of their data. "
        "The noise multiplier of the event includes the factor 2 of the changed update."
    )


def _virtual_clients(plan: MechanismPlan) -> str:
    clients = f"{plan.normalizer:.4g} of {plan.virtual_clients:,} virtual clients a round"
    return clients + (f" (probability {plan.chance:.4g})" if plan.chance else " in turn")


@dataclass(frozen=True, kw_only=True)
class MechanismText(Generic[P_contra]):
    """Text and curve style of one mechanism."""

    label: str
    """Name in figures."""
    sampler: str
    """Participants of a round, for the privacy report."""
    explanation: Callable[[P_contra], str]
    """Returns the paragraph about the sampler, for `fedemb plan --explain`."""
    adjacency: Callable[[P_contra], str] = _user_adjacency
    """Returns the paragraph about neighboring data sets, for `fedemb plan --explain`."""
    participants: Callable[[P_contra], str] = _virtual_clients
    """Returns the participants of a round, on one line."""
    color: str = "#555555"
    """Color of the curve in figures."""
    dash: Dash = "-"
    """Line style of the curve in figures."""


def _unit_adjacency(change: str) -> Callable[[PerUnitSampling], str]:
    """Returns the text for mechanisms that sample units independently."""

    def text(plan: PerUnitSampling) -> str:
        data = " with all of their data" if plan.unit == "user" else ""
        return (
            f"Adjacency. Two data sets that differ in the presence of one {plan.unit}{data}: "
            f"{change}."
        )

    return text


def _poisson_gaussian(plan: PoissonGaussian) -> str:
    if plan.sampling_probability == 1:
        return (
            f"Sampler. None: every {plan.unit} participates in every round (full batch), so the "
            "guarantee depends on noise only."
        )
    return (
        f"Sampler. In every round, each {plan.unit} participates independently with probability "
        f"{plan.sampling_probability:.4g}, by a secret coin. About {plan.units_per_round} "
        "participate; the actual number is never published. Shuffled epochs are another mechanism, "
        "and this price does not hold for them."
    )


def _units(plan: PoissonGaussian) -> str:
    if plan.sampling_probability == 1:
        return f"every {plan.unit} in every round (full batch)"
    return (
        f"about {plan.units_per_round:,} {plan.unit}s a round (probability "
        f"{plan.sampling_probability:.4g})"
    )


def _drawn_users(plan: GroupedUsers) -> str:
    return (
        f"{plan.clients_per_round:.4g} virtual clients a round, of users drawn with probability "
        f"{plan.sampling_probability:.4g}"
    )


def _round_robin(plan: RoundRobinPlan, noise: str) -> str:
    return (
        f"Sampler. None: {plan.virtual_clients} virtual clients participate in turn, "
        f"{plan.clients_per_round} per round, each at most {plan.max_participations} times and at "
        f"least {plan.min_separation} rounds apart. {noise} A participation changes an update by "
        "up to twice the clip (2C)."
    )


TEXTS: dict[str, MechanismText[Never]] = {
    "group_poisson_gaussian": MechanismText[GroupPoissonGaussian](
        label="group poisson gaussian",
        sampler="each virtual client independently with the sampling probability",
        explanation=lambda plan: (
            f"Sampler. Users are hashed once into {plan.virtual_clients} virtual clients. In every "
            "round, each virtual client participates with probability "
            f"{plan.sampling_probability:.4g}, by a secret coin, whether or not it has users. All "
            f"of its users participate, or none. About {plan.normalizer:.4g} virtual clients "
            "participate; the actual number is never published."
        ),
        adjacency=lambda _: (
            "Adjacency. Two data sets that differ in the presence of one user with all of their "
            "data. The update of one virtual client is replaced by another, which is the meaning "
            "of REPLACE_ONE here: no user is replaced by another user."
        ),
        color="#17627d",
    ),
    "poisson_gaussian": MechanismText[PoissonGaussian](
        label="poisson gaussian",
        sampler="each unit independently with the sampling probability",
        explanation=_poisson_gaussian,
        adjacency=_unit_adjacency(
            "one clipped vector more or less in the sum of each round that the coins select"
        ),
        participants=_units,
        color="#a03060",
    ),
    "capped_image_poisson": MechanismText[CappedImagePoisson](
        label="capped image poisson",
        sampler="each image independently with the sampling probability, at most m of a user",
        explanation=lambda plan: (
            "Sampler. In every round, each image participates with probability "
            f"{plan.sampling_probability:.4g}, by a secret coin, at most {plan.images_per_user} "
            f"images of a user. About {plan.images_per_round} images participate; the actual "
            "number is never published. The price is that of a user: of all images of one user "
            "that the coins may select."
        ),
        adjacency=lambda plan: (
            "Adjacency. Two data sets that differ in the presence of one user with all of their "
            f"data: up to {plan.images_per_user} clipped vectors more or fewer in the sum of a "
            "round, as many as the coins select."
        ),
        participants=lambda plan: (
            f"about {plan.images_per_round:,} images a round (probability "
            f"{plan.sampling_probability:.4g}), at most {plan.images_per_user} of a user"
        ),
        color="#8a6d1f",
        dash=(0, (4, 1, 1, 1)),
    ),
    "random_allocation": MechanismText[RandomAllocation](
        label="random allocation",
        sampler="each unit in exactly one round of each epoch, drawn independently",
        explanation=lambda plan: (
            f"Sampler. In every epoch of {plan.rounds_per_epoch} rounds, each {plan.unit} "
            "participates in exactly one round, drawn in secret and independently of all others. "
            "The round is never published."
        ),
        adjacency=_unit_adjacency(
            "one clipped vector more or less in one secret round of each epoch"
        ),
        participants=lambda plan: (
            f"about {plan.units_per_round:,} {plan.unit}s a round, each in one of "
            f"{plan.rounds_per_epoch} rounds"
        ),
        color="#5b5ea6",
        dash=":",
    ),
    "least_squares": MechanismText[LeastSquares](
        label="least squares",
        sampler="every unit, in the only round",
        explanation=lambda plan: (
            f"Sampler. None: every {plan.unit} adds one record to one sum, which is noised once. "
            "The head is computed from the noised sum only."
        ),
        adjacency=_unit_adjacency("one record of bounded norm more or less in the only sum"),
        participants=lambda plan: (
            f"every {plan.unit}, about {plan.units_per_round:,}, in one round"
        ),
        color="#3a7d44",
        dash="-.",
    ),
    "covariance": MechanismText[Covariance](
        label="covariance",
        sampler="every user, in the only round",
        explanation=lambda _: (
            "Sampler. None: every user adds one record, mean and covariance of the user's "
            "features, to one sum, which is noised once. The projection is computed from the "
            "noised sum only."
        ),
        adjacency=_unit_adjacency("one record of bounded norm more or less in the only sum"),
        participants=lambda plan: f"every user, about {plan.units_per_round:,}, in one round",
        color="#7a4a1f",
        dash=(0, (2, 1)),
    ),
    "user_poisson": MechanismText[UserPoisson](
        label="user poisson",
        sampler="each user independently, then hashed into virtual clients",
        explanation=lambda plan: (
            "Sampler. In every round, each user participates with probability "
            f"{plan.sampling_probability:.4g}, by a secret coin, and is hashed into one of "
            f"{plan.clients_per_round} virtual clients. A user changes the update of a virtual "
            "client that participates in any case, by up to twice the clip (2C)."
        ),
        participants=_drawn_users,
        color="#b4541a",
        dash="--",
    ),
    "fixed_size": MechanismText[FixedSize](
        label="fixed size",
        sampler="a fixed number of user slots without replacement",
        explanation=lambda plan: (
            f"Sampler. In every round, {plan.clients_per_round} virtual clients of "
            f"{plan.users_per_client} users are drawn without replacement, as in the paper. A user "
            "replaces another user of the same virtual client, whose update then changes by up to "
            "twice the clip (2C)."
        ),
        participants=_drawn_users,
        color="#8c6d1f",
        dash=":",
    ),
    "tree_aggregation": MechanismText[TreeAggregation](
        label="tree aggregation",
        sampler="every virtual client in a fixed order, with bounded participation",
        explanation=lambda plan: _round_robin(
            plan, "Noise is added on the nodes of a binary tree over rounds."
        ),
        color="#6a4fa3",
        dash="-.",
    ),
    "blt": MechanismText[Blt](
        label="BLT",
        sampler="every virtual client in a fixed order, with bounded participation",
        explanation=lambda plan: _round_robin(
            plan, "The noise of a round partly cancels the noise of earlier rounds."
        ),
        color="#5c7a1f",
        dash=(0, (6, 2, 1, 2, 1, 2)),
    ),
    "not_private": MechanismText[NotPrivate](
        label="not private",
        sampler="each virtual client independently with the sampling probability",
        explanation=lambda plan: (
            f"Sampler. Each of {plan.virtual_clients} virtual clients participates with "
            f"probability {plan.sampling_probability:.4g}. No noise: the run has no guarantee, and "
            "every gate denies its release."
        ),
    ),
}
"""By kind of the mechanism."""


def _text(plan: P) -> MechanismText[P]:
    return cast("MechanismText[P]", TEXTS[plan.kind])  # the kind names the class of the plan


def explanation(plan: MechanismPlan) -> str:
    """Returns the paragraph about the sampler of a plan."""
    return _text(plan).explanation(plan)


def adjacency(plan: MechanismPlan) -> str:
    """Returns the paragraph about the neighboring data sets of a plan."""
    return _text(plan).adjacency(plan)


def participants(plan: MechanismPlan) -> str:
    """Returns the participants of a round of a plan, on one line."""
    return _text(plan).participants(plan)


def comparison(plan: MechanismPlan, name: str) -> str:
    """Returns the label of a comparison figure of a plan; see `MechanismPlan.comparisons`."""
    if name == "users_sampled":
        return "epsilon if whole users were sampled, same noise on the mean"
    images = plan.images_per_unit if isinstance(plan, PoissonGaussian) else 1
    return f"epsilon if images were sampled, at most {images} of a user, same noise on the mean"
