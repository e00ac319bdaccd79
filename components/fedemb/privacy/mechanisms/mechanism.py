"""One frozen object that holds sampler, clip, noise, normalizer and price of a run.

Whoever samples, clips or adds noise asks it, and so does the accountant: what is priced cannot
drift from what runs. Every mechanism is a class of its own in a module of its own, below
`MechanismPlan`; `registry` finds it by `kind`. Sensitivity is counted for units, not for virtual
clients (docs: privacy).

Only data and words at import: numpy, dp-accounting and the samplers are imported where they are
used, since every configuration and every help page imports these modules.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, model_validator

from fedemb.errors import ConfigError
from fedemb.privacy.accounting.units import Unit
from fedemb.privacy.mechanisms.section import AdaptiveClipConfig, MechanismConfig
from fedemb.privacy.randomness.grid import GRID_BITS, MOST_GRID_BITS, check_room

if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation
    from dp_accounting import dp_event as dpe

    from fedemb.privacy.randomness.keyed_noise import CorrelatedStream
    from fedemb.privacy.randomness.sampling import Index, Sampler, VirtualClient

SCHEMA = "fedemb/mechanism_plan/2"
LEAST_NOISE = 1e-6
"""Of the two noise multipliers of an adaptive clip, whose squares are inverted to join them."""

_PER_ROUND = {"clients_per_round", "units_per_round", "images_per_round"}
"""Fields of a sampler that say how many take part."""


@dataclass(frozen=True, kw_only=True)
class PublicNumbers:
    """What a plan takes from partition and policy."""

    virtual_clients: int
    groupings: int
    users_lower_bound: int
    max_images_per_user: int = 1
    unit: Unit = "user"


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The few public numbers that any mechanism can be planned from."""

    population: int
    users_per_client: int
    clients_per_round: int
    noise_multiplier: float
    rounds: int
    virtual_clients: int = 0
    """0: as many as the population fills."""
    unit: Unit = "user"
    max_images_per_user: int = 1

    @property
    def groups(self) -> int:
        """Virtual clients."""
        return self.virtual_clients or max(1, round(self.population / self.users_per_client))

    @property
    def numbers(self) -> PublicNumbers:
        """As if partition and policy said so."""
        return PublicNumbers(
            virtual_clients=self.groups,
            groupings=1,
            users_lower_bound=self.population,
            max_images_per_user=self.max_images_per_user,
            unit=self.unit,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same noise under another sampler or reading: shown beside the price, never claimed."""

    name: str
    event: dpe.DpEvent
    relation: NeighboringRelation


class MechanismPlan(MechanismConfig):
    """Everything that decides the guarantee of a run, all of it public.

    A section of the configuration, and the numbers of partition and policy that it runs on.
    """

    section: ClassVar[type[MechanismConfig]]
    """What a configuration says of this mechanism."""
    relation_name: ClassVar[str] = "ADD_OR_REMOVE_ONE"
    """Relation the events are meant under; it covers adding or removing one unit."""
    proof: ClassVar[str] = ""
    """Why the event prices one unit (docs/privacy/sensitivity.md); without it the gate denies."""
    samples_by_index: ClassVar[bool] = False
    """Whether users are drawn by their place in the store, where one who leaves moves others; the
    proof then pairs the draws on both data sets in another way."""
    compared: ClassVar[bool] = False
    """Whether extrapolations show it beside other plans; it must be planned at once."""

    virtual_clients: PositiveInt
    """Virtual clients per grouping (G)."""
    groupings: PositiveInt
    """Independent groupings (R)."""
    unit: Unit = "user"
    """Whose presence the guarantee hides."""
    noise_multiplier: NonNegativeFloat = 0.0
    """Standard deviation of the noise on the sum / clip; 0 only where there is no guarantee."""
    adaptive_clip: AdaptiveClipConfig | None = None
    """Null: the clip is `l2_norm_clip` in every round; else that is where it starts."""
    grid_bits: int = Field(default=GRID_BITS, le=MOST_GRID_BITS)
    """Updates and noise live on multiples of clip / 2^grid_bits."""

    # ---- where it comes from ------------------------------------------------------------------

    @classmethod
    def of(cls, section: MechanismConfig, numbers: PublicNumbers) -> Self:
        """The plan of a section.

        Raises:
          ConfigError: it cannot run on these numbers with the guarantee it claims.
        """
        return cls(
            **_fields(section),
            virtual_clients=numbers.virtual_clients,
            groupings=numbers.groupings,
            unit=numbers.unit,
            **cls.derived(section, numbers),
        )

    @classmethod
    def derived(cls, section: Any, numbers: PublicNumbers) -> dict[str, Any]:
        """Further fields that follow from section and public numbers."""
        return {}

    @classmethod
    @abstractmethod
    def section_at(cls, cohort: Cohort, **options: Any) -> dict[str, Any]:
        """The section, as a tree, that suits a cohort; `options` are those of the command line."""

    @classmethod
    def at(cls, cohort: Cohort) -> Self:
        """The plan for a cohort; participation as even as the schedule allows.

        Raises:
          ConfigError: the cohort asks for more clients than there are.
        """
        if cohort.clients_per_round > cohort.groups:
            raise ConfigError(
                f"{cohort.clients_per_round} clients per round exceed the {cohort.groups} virtual "
                f"clients of {cohort.population} users; lower clients_per_round or users_per_client"
            )
        tree = {"kind": cls.kind_name(), "rounds": cohort.rounds, **cls.section_at(cohort)}
        return cls.of(cls.section.model_validate(tree), cohort.numbers)

    def expected(self, section: MechanismConfig, numbers: PublicNumbers) -> MechanismPlan:
        """What a configuration asks for, given what the planner of this plan chose freely.

        Raises:
          PlanMismatch: the choice is not one that the configuration allows.
        """
        return type(self).of(section, numbers)

    def replaced(self, **changes: Any) -> Self:
        """A checked copy with other fields."""
        return type(self)(**{**_fields(self), **changes})

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}, got {item['input']!r}"
                for item in error.errors()
            ]
            raise ConfigError(
                f"mechanism plan: {'; '.join(problems)}; correct the configuration and plan again"
            ) from error

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Refuses a plan that cannot run with the guarantee it claims.

        Raises:
          ConfigError: a number is out of bounds or contradicts another.
          PlanMismatch: a derived number is not the one we compute.
        """
        if self.private:
            _above("noise_multiplier", self.noise_multiplier)
            if self.grid_bits < GRID_BITS:
                raise ConfigError(
                    f"grid_bits={self.grid_bits} is below {GRID_BITS}, where records of a large "
                    "net would be cut to a few digits"
                )
        count_noise = 0.0
        if self.adaptive_clip is not None:
            if "adaptive_clip" not in self.section.model_fields:
                raise ConfigError(f"{self.kind} needs a constant clip; drop adaptive_clip")
            count_noise = self.adaptive_clip.count_noise_multiplier
            _above("count_noise_multiplier", count_noise, LEAST_NOISE)
            _above("noise_multiplier", self.noise_multiplier, LEAST_NOISE)
        check_room(
            self.grid_bits,
            self.most_contributions,
            max(self.noise_multiplier, count_noise),
            correlated=self.tracks_participation,
        )

    # ---- what runs ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def normalizer(self) -> float:
        """Public constant the noised sum is divided by, never the number who showed up."""

    @property
    def chance(self) -> float | None:
        """Sampling probability of whatever is sampled; None where nothing is."""
        return getattr(self, "sampling_probability", None)

    @property
    def most_contributions(self) -> int:
        """Clipped vectors in the sum of a round, at most."""
        return self.virtual_clients

    @property
    def user_contributions(self) -> int:
        """Clipped vectors in the sum of a round that one user can change, at most."""
        return 1

    def sampler(self, coin_key: bytes) -> Sampler:
        """The sampler that the event is the price of.

        Args:
          coin_key: `noise.run_key(root, "coins", ...)`.
        """
        from fedemb.privacy.randomness.sampling import Sampler

        return Sampler(self, coin_key)

    @abstractmethod
    def sample(self, round_key: bytes, round_index: int, index: Index) -> list[VirtualClient]:
        """Who takes part in a round: reads coins and public constants first and users last.

        Args:
          round_key: secret bytes of the round, for coins alone.
          round_index: the round.
          index: the users.
        """

    def noise_stream(self, size: int) -> CorrelatedStream | None:
        """Noise of vectors of `size` whose rounds depend on each other; None: fresh each round."""
        return None

    # ---- what it costs ------------------------------------------------------------------------

    @property
    def relation(self) -> NeighboringRelation:
        """Relation of `event`."""
        from dp_accounting import NeighboringRelation

        return NeighboringRelation[self.relation_name]

    @property
    def joint_noise_multiplier(self) -> float:
        """Noise multiplier of update and, if the clip is adaptive, quantile bit together."""
        if self.adaptive_clip is None:
            return self.noise_multiplier
        # The bit is +-1/2, so its multiplier is count noise / (1/2)
        # (docs/privacy/sensitivity.md#adaptive-clip).
        bit = 2 * self.adaptive_clip.count_noise_multiplier
        return (self.noise_multiplier**-2 + bit**-2) ** -0.5

    @property
    @abstractmethod
    def round_event(self) -> dpe.DpEvent:
        """Event of one round; unsupported where rounds share noise and have no price alone."""

    def event(self, rounds: int | None = None) -> dpe.DpEvent:
        """Event of a run that stopped after `rounds` rounds; the whole run by default.

        Raises:
          ValueError: more rounds than planned, or fewer than none.
        """
        from dp_accounting import dp_event as dpe

        count = self.rounds if rounds is None else rounds
        if not 0 <= count <= self.rounds:
            raise ValueError(f"rounds={count} must lie in 0..{self.rounds}, the planned rounds")
        return self.event_of(count) if count else dpe.NoOpDpEvent()

    def event_of(self, rounds: int) -> dpe.DpEvent:
        """Event of the first rounds, one or more; by default that many times `round_event`."""
        from dp_accounting import dp_event as dpe

        return dpe.SelfComposedDpEvent(self.round_event, rounds)

    def conservative_event(self) -> dpe.DpEvent | None:
        """The run as if users were sampled and then grouped: twice the clip (2C).

        Meant under ADD_OR_REMOVE_ONE. The event itself where it is priced so already; None where
        nobody is grouped.
        """
        return self.event()

    def comparisons(self) -> tuple[Comparison, ...]:
        """Other prices of the same noise, to stand beside this one."""
        return ()

    @property
    def zcdp_rho(self) -> float | None:
        """The zCDP parameter, where the run is one Gaussian mechanism."""
        from dp_accounting import dp_event as dpe

        event = self.event()
        if not isinstance(event, dpe.GaussianDpEvent):
            return None
        return 1 / (2 * event.noise_multiplier**2)

    # ---- the same noise elsewhere -------------------------------------------------------------

    def scaled(self, population: float = 1.0, compute: float = 1.0) -> Self:
        """The paper's extrapolation: more users, or more compute, at the same noise on the mean.

        Both at once leave the sampling probability as it is, so utility should stay while epsilon
        falls (Xu et al., arXiv 2211.10844, section 4; docs/how_to/choose_epsilon.md#projections).

        Args:
          population: users and virtual clients, times this.
          compute: clients per round and noise, times this.
        """
        adaptive = self.adaptive_clip
        if adaptive is not None:
            noise = adaptive.count_noise_multiplier * compute
            adaptive = adaptive.model_copy(update={"count_noise_multiplier": noise})
        changes = {
            "adaptive_clip": adaptive,
            "virtual_clients": times(self.virtual_clients, population),
            "noise_multiplier": self.noise_multiplier * compute,
        }
        return self.replaced(**changes, **self.scaled_sampling(population, compute))

    def scaled_sampling(self, population: float, compute: float) -> dict[str, Any]:
        """The fields of the sampler under `scaled`: a chance, and numbers of a round."""
        counts = _PER_ROUND & type(self).model_fields.keys()
        changes: dict[str, Any] = {name: times(getattr(self, name), compute) for name in counts}
        if self.chance is not None:
            changes["sampling_probability"] = self.chance * (compute / population)
        return changes

    def at_equal_utility(self, independent_noise: float) -> Self:
        """The plan whose running sums of updates are as noisy as under independent noise.

        See docs/privacy/accounting.md#equal-utility.
        """
        return self.replaced(noise_multiplier=independent_noise)

    def matrix(self) -> dict[str, Any] | None:
        """What correlates the noise, for the report; None: nothing does."""
        return None

    # ---- as data ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object; `registry.plan_from_json` reads it."""
        return {"schema": SCHEMA, **self.model_dump(mode="json")}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        from fedemb.foundation.canonical_json import json_digest

        return json_digest(self.to_json())


def times(value: int, factor: float) -> int:
    """A count scaled and rounded, at least 1."""
    return max(1, round(value * factor))


def _above(name: str, value: float, low: float = 0.0) -> None:
    if not low < value < math.inf:  # written so that NaN fails
        raise ConfigError(
            f"mechanism plan: {name}={value} must be a number above {low:g}; correct the "
            "configuration and plan again"
        )


def _fields(section: MechanismConfig) -> Mapping[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields}
