"""One frozen object that holds sampler, clip, noise, normaliser and price of a run.

Whoever samples, clips or adds noise reads these fields, and so does the accountant: what is priced
cannot drift from what runs. Sensitivity is counted for users, not for virtual clients (dp.md 2.1).
"""

# The numeric libraries ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe

from fedemb.config import (
    TRACKS_PARTICIPATION,
    AdaptiveClipConfig,
    BltConfig,
    FixedSizeConfig,
    GroupPoissonGaussianConfig,
    MechanismConfig,
    NotPrivateConfig,
    RunConfig,
    TreeAggregationConfig,
    UserPoissonConfig,
)
from fedemb.documents.artifacts import json_digest
from fedemb.errors import ArtifactError
from fedemb.privacy.mechanisms import blt, tree
from fedemb.privacy.mechanisms.noise import GRID_BITS
from fedemb.privacy.mechanisms.plan_checks import MAX_SUM_BITS, check_plan

Kind = Literal[
    "group_poisson_gaussian",
    "user_poisson",
    "fixed_size",
    "tree_aggregation",
    "blt",
    "not_private",
]
SCHEMA = "fedemb/mechanism_plan/1"


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """Quantile clipping (Andrew et al., arXiv 1905.03871)."""

    target_quantile: float
    learning_rate: float
    count_noise_multiplier: float
    """Standard deviation of the noise on the count of unclipped virtual clients, in clients."""


@dataclass(frozen=True, kw_only=True)
class MechanismPlan:
    """Everything that decides the guarantee of a run, all of it public."""

    kind: Kind
    rounds: int
    l2_norm_clip: float
    """Bound on one virtual client's update; the first round's, if the clip is adaptive."""
    noise_multiplier: float
    """Standard deviation of the noise on the sum / clip; 0 only for `not_private`."""
    virtual_clients: int
    groupings: int
    sampling_probability: float | None = None
    """Chance of a virtual client (user, for `user_poisson` and `fixed_size`) in a round."""
    clients_per_round: int | None = None
    users_per_client: int | None = None
    users_lower_bound: int | None = None
    """`fixed_size` only: the sampler draws from at least this many slots."""
    adaptive_clip: AdaptiveClip | None = None
    min_separation: int | None = None
    max_participations: int | None = None
    restart_every: int | None = None
    blt_decay: tuple[float, ...] | None = None
    """Decay of each noise buffer, in (0, 1)."""
    blt_scale: tuple[float, ...] | None = None
    """Output scale of each noise buffer."""
    matrix_sensitivity: float | None = None
    """Norm by which one user's clipped updates enter the correlated noise, per unit of change."""
    grid_bits: int = GRID_BITS

    def __post_init__(self) -> None:
        """Refuses numbers out of bounds and a matrix sensitivity that is not ours.

        Raises:
          ConfigError: the plan cannot run with the guarantee it claims.
          PlanMismatch: the stored matrix sensitivity differs from the recomputed one.
        """
        check_plan(self)

    # ---- what runs ----------------------------------------------------------------------------

    @property
    def normaliser(self) -> float:
        """Public constant the noised sum is divided by, never the number who showed up."""
        if self.clients_per_round is not None:
            return float(self.clients_per_round)
        return float(cast("float", self.sampling_probability)) * self.virtual_clients

    @property
    def tracks_participation(self) -> bool:
        """Whether the guarantee rests on how often a virtual client takes part."""
        return self.kind in TRACKS_PARTICIPATION

    @property
    def private(self) -> bool:
        """Whether there is any guarantee."""
        return self.kind != "not_private"

    # ---- what it costs ------------------------------------------------------------------------

    @property
    def relation(self) -> NeighboringRelation:
        """Relation the events are meant under; each covers adding or removing one user."""
        if self.kind == "group_poisson_gaussian":
            return NeighboringRelation.REPLACE_ONE
        return NeighboringRelation.ADD_OR_REMOVE_ONE

    @property
    def joint_noise_multiplier(self) -> float:
        """Noise multiplier of update and, if the clip is adaptive, quantile bit together."""
        if self.adaptive_clip is None:
            return self.noise_multiplier
        # The bit is +-1/2, so its multiplier is count noise / (1/2) (dp.md 2.6).
        bit = 2 * self.adaptive_clip.count_noise_multiplier
        return (self.noise_multiplier**-2 + bit**-2) ** -0.5

    @property
    def round_event(self) -> dpe.DpEvent:
        """Event of one round; unsupported where rounds share noise and have no price alone."""
        multiplier = self.joint_noise_multiplier
        if self.kind == "not_private":
            return dpe.NonPrivateDpEvent()
        if self.tracks_participation:
            return dpe.UnsupportedDpEvent()
        if self.kind != "group_poisson_gaussian":
            # Nothing hides the virtual client a user falls into: its update moves by up to 2 clips.
            multiplier /= 2
        return dpe.PoissonSampledDpEvent(
            cast("float", self.sampling_probability), dpe.GaussianDpEvent(multiplier)
        )

    def event(self, rounds: int | None = None) -> dpe.DpEvent:
        """Event of a run that stopped after `rounds` rounds; the whole run by default.

        Raises:
          ValueError: more rounds than planned, or fewer than none.
        """
        count = self.rounds if rounds is None else rounds
        if not 0 <= count <= self.rounds:
            raise ValueError(f"rounds={count} must lie in 0..{self.rounds}, the planned rounds")
        if count == 0:
            return dpe.NoOpDpEvent()
        if self.kind == "not_private":
            return dpe.NonPrivateDpEvent()
        if self.tracks_participation:
            sensitivity = 2 * self.sensitivity_over(count)
            return dpe.GaussianDpEvent(self.noise_multiplier / sensitivity)
        return dpe.SelfComposedDpEvent(self.round_event, count)

    def conservative_event(self) -> dpe.DpEvent:
        """The run as if users were sampled and then grouped: twice the clip (2C).

        Priced under `conservative_relation`. For mechanisms already priced at 2C, the event itself.
        """
        if self.kind != "group_poisson_gaussian":
            return self.event()
        return dpe.SelfComposedDpEvent(
            dpe.PoissonSampledDpEvent(
                cast("float", self.sampling_probability),
                dpe.GaussianDpEvent(self.joint_noise_multiplier / 2),
            ),
            self.rounds,
        )

    @property
    def conservative_relation(self) -> NeighboringRelation:
        """Relation of `conservative_event`."""
        return NeighboringRelation.ADD_OR_REMOVE_ONE

    @property
    def zcdp_rho(self) -> float | None:
        """The zCDP parameter, where the run is one Gaussian mechanism."""
        event = self.event()
        if not isinstance(event, dpe.GaussianDpEvent):
            return None
        return 1 / (2 * event.noise_multiplier**2)

    def sensitivity_over(self, rounds: int) -> float:
        """Matrix sensitivity of the first rounds of a correlated mechanism."""
        if self.kind == "tree_aggregation":
            return tree.sensitivity(
                rounds,
                cast("int", self.min_separation),
                cast("int", self.max_participations),
                self.restart_every or 0,
            )
        if self.kind == "blt":
            return blt.sensitivity(
                blt.coefficients(
                    cast("tuple[float, ...]", self.blt_decay),
                    cast("tuple[float, ...]", self.blt_scale),
                    rounds,
                ),
                cast("int", self.min_separation),
                cast("int", self.max_participations),
            )
        raise ValueError(f"{self.kind} draws fresh noise each round and has no matrix")

    def scaled(self, factor: float) -> MechanismPlan:
        """The paper's extrapolation: population, cohort and noise times `factor`.

        Noise on the mean, users per virtual client and sampling probability stay as they are, so
        utility should too, while epsilon falls (Xu et al., arXiv 2211.10844; dp.md 8).
        """

        def times(value: int | None) -> int | None:
            return None if value is None else max(1, round(value * factor))

        adaptive = self.adaptive_clip
        if adaptive is not None:
            noise = adaptive.count_noise_multiplier * factor
            adaptive = dataclasses.replace(adaptive, count_noise_multiplier=noise)
        return dataclasses.replace(
            self,
            adaptive_clip=adaptive,
            virtual_clients=max(1, round(self.virtual_clients * factor)),
            clients_per_round=times(self.clients_per_round),
            users_lower_bound=times(self.users_lower_bound),
            noise_multiplier=self.noise_multiplier * factor,
        )

    # ---- as data ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MechanismPlan:
        """Reads what `to_json` wrote; closed world.

        Raises:
          ArtifactError: another schema, a field missing, extra or of the wrong type.
          ConfigError: a number is out of bounds.
          PlanMismatch: the matrix sensitivity is not the recomputed one.
        """
        fields = dict(value)
        schema = fields.pop("schema", None)
        known = {field.name for field in dataclasses.fields(cls)}
        if schema != SCHEMA or fields.keys() != known:
            odd = sorted(fields.keys() ^ known)
            raise ArtifactError(
                f"mechanism plan has schema {schema!r} (expected {SCHEMA!r}) and missing or extra "
                f"fields {odd}; plan the run anew"
            )
        for name in ("blt_decay", "blt_scale"):
            if isinstance(fields[name], list):
                fields[name] = tuple(cast("list[float]", fields[name]))
        try:
            if fields["adaptive_clip"] is not None:
                fields["adaptive_clip"] = AdaptiveClip(**fields["adaptive_clip"])
            return cls(**fields)
        except TypeError as error:
            raise ArtifactError(
                f"mechanism plan holds a field of the wrong type ({error}); plan the run anew"
            ) from error

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return json_digest(self.to_json())


def plan_mechanism(config: RunConfig) -> MechanismPlan:
    """Turns a configuration into a mechanism plan; for `blt` this optimises the noise (seconds).

    Raises:
      ConfigError: the mechanism cannot run on this partition with the guarantee it claims.
    """
    return plan_of(
        config.mechanism,
        virtual_clients=config.partition.virtual_clients,
        groupings=config.partition.groupings,
        users_lower_bound=config.policy.users_lower_bound,
    )


def plan_of(
    mechanism: MechanismConfig, *, virtual_clients: int, groupings: int, users_lower_bound: int
) -> MechanismPlan:
    """Like `plan_mechanism`, from the parts that decide."""
    common: dict[str, Any] = {
        "kind": mechanism.kind,
        "rounds": mechanism.rounds,
        "l2_norm_clip": mechanism.l2_norm_clip,
        "noise_multiplier": getattr(mechanism, "noise_multiplier", 0.0),
        "virtual_clients": virtual_clients,
        "groupings": groupings,
        "adaptive_clip": _adaptive(getattr(mechanism, "adaptive_clip", None)),
    }
    match mechanism:
        case GroupPoissonGaussianConfig():
            common["sampling_probability"] = mechanism.sampling_probability
        case NotPrivateConfig():
            common["sampling_probability"] = mechanism.sampling_probability
            # No noise to hide a coarse grid: take all the bits that sums leave.
            room = MAX_SUM_BITS - math.ceil(math.log2(virtual_clients + 1))
            common["grid_bits"] = min(48, room)
        case UserPoissonConfig():
            common["sampling_probability"] = mechanism.sampling_probability
            common["clients_per_round"] = mechanism.clients_per_round
        case FixedSizeConfig():
            cohort = mechanism.clients_per_round * mechanism.users_per_client
            common["sampling_probability"] = cohort / users_lower_bound
            common["clients_per_round"] = mechanism.clients_per_round
            common["users_per_client"] = mechanism.users_per_client
            common["users_lower_bound"] = users_lower_bound
        case TreeAggregationConfig():
            common |= _participation(mechanism)
            common["restart_every"] = mechanism.restart_every
            common["matrix_sensitivity"] = tree.sensitivity(
                mechanism.rounds,
                mechanism.min_separation,
                mechanism.max_participations,
                mechanism.restart_every,
            )
        case BltConfig():
            common |= _participation(mechanism)
            decay, scale = blt.optimise(
                mechanism.rounds,
                mechanism.min_separation,
                mechanism.max_participations,
                mechanism.buffers,
            )
            common["blt_decay"], common["blt_scale"] = decay, scale
            common["matrix_sensitivity"] = blt.sensitivity(
                blt.coefficients(decay, scale, mechanism.rounds),
                mechanism.min_separation,
                mechanism.max_participations,
            )
    return MechanismPlan(**common)


def _participation(mechanism: TreeAggregationConfig | BltConfig) -> dict[str, int]:
    return {
        "clients_per_round": mechanism.clients_per_round,
        "min_separation": mechanism.min_separation,
        "max_participations": mechanism.max_participations,
    }


def _adaptive(config: AdaptiveClipConfig | None) -> AdaptiveClip | None:
    return None if config is None else AdaptiveClip(**config.model_dump())
