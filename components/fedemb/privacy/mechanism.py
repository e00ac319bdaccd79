"""Frozen plan of a run: sampler, clipping norm, noise, normalizer and privacy loss in one object.

Sampling, clipping, noise and accounting read the same fields, so the accountant prices exactly the
mechanism that runs. Each mechanism is a subclass of `MechanismPlan` in a separate module, and
`registry` finds it by `kind`. Sensitivity is that of a unit, not of a virtual client.

NumPy, dp-accounting and the samplers are imported inside functions, because every configuration and
every help page imports these modules.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonObject, json_digest
from fedemb.privacy.section import (
    GRID_BITS,
    MAX_SUM_BITS,
    MOST_GRID_BITS,
    MechanismConfig,
    PublicNumbers,
    Unit,
    check_room,
)

if TYPE_CHECKING:
    from dp_accounting import dp_event as dpe
    from dp_accounting.privacy_accountant import NeighboringRelation

SCHEMA = "fedemb/mechanism_plan/3"

_PER_ROUND = {"clients_per_round", "units_per_round", "images_per_round"}
"""Sampler fields that count participants of a round."""


class MechanismPlan(MechanismConfig):
    """All public parameters that determine the guarantee of a run.

    Fields: those of the mechanism's section of the configuration, and public numbers of partition
    and policy.
    """

    section: ClassVar[type[MechanismConfig]]
    """Section of the configuration for this mechanism."""
    relation_name: ClassVar[str] = "ADD_OR_REMOVE_ONE"
    """Neighboring relation of the events; covers adding or removing one unit."""
    proof: ClassVar[str] = ""
    """Reason why the event bounds one unit (docs/privacy/sensitivity.md); the gate requires it."""

    virtual_clients: PositiveInt
    """Virtual clients per grouping (G)."""
    groupings: PositiveInt
    """Independent groupings (R)."""
    unit: Unit = "user"
    """Privacy unit: one user with all of their data, or one image."""
    images_per_user: PositiveInt = 1
    """Maximum number of images of a unit (m)."""
    grid_bits: int = Field(default=GRID_BITS, le=MOST_GRID_BITS)
    """Updates and noise are multiples of clip / 2^grid_bits."""

    # ---- construction -------------------------------------------------------------------------

    @classmethod
    def of(cls, section: MechanismConfig, numbers: PublicNumbers) -> Self:
        """Returns the plan of a section.

        Raises:
          ConfigError: the mechanism cannot run on these numbers with the guarantee it claims.
        """
        # Without noise a coarse grid is visible: use all bits that sums leave.
        room = MAX_SUM_BITS - math.ceil(math.log2(numbers.virtual_clients + 1))
        return cls.model_validate(
            {
                **_fields(section),
                "virtual_clients": numbers.virtual_clients,
                "groupings": numbers.groupings,
                "unit": numbers.unit,
                "images_per_user": 1 if numbers.unit == "image" else numbers.max_images_per_user,
                "grid_bits": GRID_BITS if section.private else min(MOST_GRID_BITS, room),
            }
        )

    def replaced(self, **changes: object) -> Self:
        """Returns a validated copy with changed fields."""
        return type(self).model_validate({**_fields(self), **changes})

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
        """Checks that the plan can run with the guarantee it claims.

        Raises:
          ConfigError: a number is out of bounds or contradicts another.
        """
        if self.private and self.grid_bits < GRID_BITS:
            raise ConfigError(
                f"grid_bits={self.grid_bits} is below {GRID_BITS}, which leaves too few digits "
                f"for records of a large network. Set at least {GRID_BITS}."
            )
        check_room(
            self.grid_bits,
            self.most_contributions,
            self.noise_multiplier,
            correlated=self.tracks_participation,
        )

    # ---- execution ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def normalizer(self) -> float:
        """Public constant that divides the noised sum; never the number of participants."""

    @property
    def chance(self) -> float | None:
        """Sampling probability; None: virtual clients take turns."""
        return getattr(self, "sampling_probability", None)

    @property
    def most_contributions(self) -> int:
        """Maximum number of clipped vectors in the sum of a round."""
        return self.virtual_clients

    @property
    def user_contributions(self) -> int:
        """Maximum number of clipped vectors that one user can change in the sum of a round."""
        return 1

    # ---- privacy loss -------------------------------------------------------------------------

    @property
    def relation(self) -> NeighboringRelation:
        """Neighboring relation of `event`."""
        from dp_accounting.privacy_accountant import NeighboringRelation

        return NeighboringRelation[self.relation_name]

    @property
    @abstractmethod
    def round_event(self) -> dpe.DpEvent:
        """Event of one round of full norm; unsupported if rounds share noise."""

    def event(self, rounds: int | None = None) -> dpe.DpEvent:
        """Returns the event of a run that stopped after `rounds` rounds; all by default.

        Raises:
          ValueError: `rounds` is negative or above the planned number.
        """
        from dp_accounting import dp_event as dpe

        count = self.rounds if rounds is None else rounds
        if not 0 <= count <= self.rounds:
            raise ValueError(
                f"rounds={count} must be in 0..{self.rounds}, the planned rounds; lower it"
            )
        return self.event_of(count) if count else dpe.NoOpDpEvent()

    def event_of(self, rounds: int) -> dpe.DpEvent:
        """Returns the event of the first `rounds` rounds, at least one."""
        from dp_accounting import dp_event as dpe

        return dpe.SelfComposedDpEvent(self.round_event, rounds)

    def conservative_event(self) -> dpe.DpEvent | None:
        """Returns the event of a run as if users were sampled and then grouped, at 2C.

        Its relation is ADD_OR_REMOVE_ONE. Equals the event of a run if that already uses twice the
        clip (2C); None if the mechanism does not group users.
        """
        return self.event_of(self.rounds)

    @property
    def zcdp_rho(self) -> float | None:
        """Parameter of zCDP if the run is one Gaussian mechanism, else None."""
        from dp_accounting import dp_event as dpe

        event = self.event()
        if not isinstance(event, dpe.GaussianDpEvent):
            return None
        return 1 / (2 * event.noise_multiplier**2)

    # ---- scaling ------------------------------------------------------------------------------

    def scaled(self, population: float = 1.0, compute: float = 1.0) -> Self:
        """Returns the plan with more users or more compute, at the same noise on the mean.

        If both factors are equal, the sampling probability is unchanged: utility should be the
        same at a smaller epsilon (Xu et al., arXiv 2211.10844, section 4;
        docs/how_to/choose_epsilon.md#projections).

        Args:
          population: factor of users and virtual clients.
          compute: factor of clients per round and noise.
        """
        changes = {
            "virtual_clients": times(self.virtual_clients, population),
            "noise_multiplier": self.noise_multiplier * compute,
        }
        return self.replaced(**changes, **self.scaled_sampling(population, compute))

    def scaled_sampling(self, population: float, compute: float) -> dict[str, float]:
        """Returns the sampler fields of `scaled`: sampling probability and counts per round."""
        counts = _PER_ROUND & type(self).model_fields.keys()
        changes: dict[str, float] = {name: times(getattr(self, name), compute) for name in counts}
        if "sampling_probability" in type(self).model_fields:
            changes["sampling_probability"] = (self.chance or 0.0) * (compute / population)
        return changes

    # ---- documents ----------------------------------------------------------------------------

    def to_json(self) -> JsonObject:
        """Returns the plan as a JSON object; `registry.plan_from_json` reads it."""
        return {"schema": SCHEMA, **self.model_dump(mode="json")}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return json_digest(self.to_json())

    @override
    def __hash__(self) -> int:
        return hash(self.digest)


def times(value: int, factor: float) -> int:
    """Returns a count scaled and rounded, at least 1."""
    return max(1, round(value * factor))


def _fields(section: MechanismConfig) -> Mapping[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields}
