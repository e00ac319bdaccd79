"""A privacy guarantee, the sampler's share of its delta, and DpEvents as JSON."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from dp_accounting import dp_event as dpe
from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.errors import ArtifactError, ConfigError
from fedemb.foundation.canonical_json import Json, JsonObject, ToJson
from fedemb.privacy.section import UNITS, Unit, count_of

SAMPLER_TOTAL_VARIATION = 2.0**-51
"""Distance of one run's noise from true Gaussians, see `noise.TOTAL_VARIATION_PER_NORMAL`."""
_FIRST_SHARE = 1e-6
"""Initial share of delta; almost always more than needed."""


def sampler_delta(epsilon: float, runs: int) -> float:
    """Returns the part of delta that drawn noise needs beyond ideal noise.

    If drawn noise is within total variation t of ideal noise on both data sets, an event has at
    most P + t <= exp(epsilon) Q + delta + t <= exp(epsilon) (Q' + t) + delta + t.

    >>> sampler_delta(1.0, 1) / SAMPLER_TOTAL_VARIATION
    3.718281828459045
    """
    if not runs:
        return 0.0
    try:
        return runs * SAMPLER_TOTAL_VARIATION * (1 + math.exp(epsilon))
    except OverflowError:
        return math.inf


class DeltaTooSmall(ConfigError, ValueError):
    """Raised for a delta at which no guarantee can be certified."""


def largest_epsilon(delta: float, runs: int) -> float:
    """Returns the epsilon at which the sampler's share equals delta: the maximum of any guarantee.

    >>> round(largest_epsilon(1e-5, 1), 1)
    23.8
    """
    ratio = delta / (max(1, runs) * SAMPLER_TOTAL_VARIATION)
    return math.log(ratio - 1) if ratio > 2 else 0.0


def with_sampler_share(ideal: Callable[[float], float], delta: float, runs: int) -> float:
    """Returns epsilon at delta of the noise that is drawn, from the epsilon of ideal noise.

    Args:
      ideal: epsilon of ideal noise as a function of its delta.
      delta: total failure probability.
      runs: number of training runs in the event; each has its share of the sampler. 0: ideal noise.

    Returns: Epsilon; infinite if the sampler is too coarse for such an epsilon at this delta.

    Raises:
      DeltaTooSmall: delta is not a probability above the sampler's share.
    """
    least = sampler_delta(0.0, runs)
    if not (least < delta < 1):
        raise DeltaTooSmall(
            f"delta={delta:g} cannot be certified: it must be above {least:.2g}, the share of the "
            "noise sampler at epsilon 0, and below 1. Set delta to about users**-1.1"
        )
    share = max(least, delta * _FIRST_SHARE)
    while share < delta:
        epsilon = float(ideal(delta - share))
        needed = sampler_delta(epsilon, runs)
        if not needed > share:  # the caller rejects NaN
            return epsilon
        share = needed * (1 + _FIRST_SHARE)
    return math.inf


# A privacy guarantee as a sentence: epsilon with delta, unit, relation and accountant.
#
# Source: Ponomareva et al., How to DP-fy ML (arXiv 2303.00654), section 5.3.3.


def neighbours(relation: NeighboringRelation, unit: Unit) -> str:
    """Describes the allowed difference between two neighbouring data sets."""
    if relation is NeighboringRelation.REPLACE_SPECIAL:
        return f"one {unit}'s data is blanked out"
    if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
        return f"one {unit} is added or removed"
    return f"one {unit} is added or removed (one virtual client's update is replaced)"


@dataclass(frozen=True, kw_only=True)
class PrivacyGuarantee:
    """(epsilon, delta)-differential privacy of one unit, and how it was computed."""

    epsilon: float
    """Bound on the log-ratio of probabilities; infinite without privacy."""
    delta: float
    """Total failure probability, `sampler_delta` included."""
    relation: NeighboringRelation
    """Neighbouring relation the accountant used."""
    accountant: str
    """`pld` or `rdp`."""
    rounds: int | None = None
    """Number of training rounds accounted for, if the event contains it."""
    sampler_delta: float = 0.0
    """Share of delta for the distance of drawn noise from true Gaussians, see `sampler_delta`."""
    unit: Unit = "user"
    """Privacy unit that is protected."""

    def __str__(self) -> str:
        """Returns the guarantee as one sentence."""
        over = f" over {count_of(self.rounds, 'round')}" if self.rounds else ""
        whole = UNITS[self.unit].whole
        if math.isinf(self.epsilon):
            return (
                f"no differential privacy for {whole}{over}: epsilon is infinite; none up to "
                f"{largest_epsilon(self.delta, 1):.3g}, the most that the noise sampler allows at "
                f"delta {self.delta:.4g}, can be certified"
            )
        return (
            f"({self.epsilon:.4g}, {self.delta:.4g})-differential privacy for {whole}, "
            f"if {neighbours(self.relation, self.unit)}{over}; "
            f"{self.accountant.upper()} accountant under {self.relation.name}; delta includes "
            f"{self.sampler_delta:.2g} for the noise sampler; the guarantee is "
            "computational, as noise and coins come from ciphers"
        )

    def to_json(self) -> JsonObject:
        """Returns the guarantee for a plan or report; an infinite epsilon is written as null."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "delta": self.delta,
            "relation": self.relation.name,
            "accountant": self.accountant,
            "rounds": self.rounds,
            "sampler_delta": self.sampler_delta,
            "unit": self.unit,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, ToJson]) -> PrivacyGuarantee:
        """Reads a guarantee written by `to_json`.

        Raises:
          ArtifactError: a field is missing or unknown.
        """
        fields = dict[str, Any](value)
        try:
            fields["relation"] = NeighboringRelation[fields["relation"]]
            fields["epsilon"] = math.inf if fields["epsilon"] is None else fields["epsilon"]
            guarantee = cls(**fields)
            if guarantee.unit not in UNITS:
                raise KeyError(f"unit {guarantee.unit!r}")
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"the guarantee has a missing, unknown or invalid field ({error}); run the step "
                "that writes it again"
            ) from error
        return guarantee


# DpEvents as JSON: only the event types listed here can be read or written.
#
# dp-accounting's own `from_named_tuple` imports any module that the data names, so it must never
# receive external bytes. The shapes below are permanent: entries may be added, never changed,
# because old ledgers must stay readable.


_REMEDY = "pass an event as fedemb writes it"
MAX_DEPTH = 16
"""Maximum nesting depth of events."""
MAX_COUNT = 10**9
"""Maximum number of repetitions, and maximum population size."""

_Check = Callable[[object, str], "float | int | list[float]"]


def _number(
    low: float, *, open_low: bool, high: float = math.inf
) -> Callable[[object, str], float]:
    def check(value: object, where: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            above = number > low if open_low else number >= low
            # An infinite upper bound still excludes infinity itself, and NaN fails every test.
            if above and number <= high and math.isfinite(number):
                return number
        bracket = "(" if open_low else "["
        raise ArtifactError(
            f"{where} is {value!r}, expected a number in {bracket}{low:g}, {high:g}]; {_REMEDY}"
        )

    return check


def _count(value: object, where: str) -> int:
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value == value // 1
        and 1 <= value <= MAX_COUNT
    ):
        return int(value)
    raise ArtifactError(f"{where} is {value!r}, expected an integer in 1..{MAX_COUNT}; {_REMEDY}")


def _numbers(value: object, where: str) -> list[float]:
    if not isinstance(value, list | tuple) or not value:
        raise ArtifactError(f"{where} is not a list of numbers; {_REMEDY}")
    check = _number(0, open_low=False)
    return [check(item, where) for item in cast("list[object]", value)]


class _Nested(Enum):
    """Fields that hold other events."""

    EVENT = "event"
    EVENTS = "events"


_EVENT, _EVENTS = _Nested.EVENT, _Nested.EVENTS
_noise = _number(0, open_low=True)
_probability = _number(0, open_low=True, high=1)

_SCHEMA: dict[str, tuple[type[dpe.DpEvent], dict[str, _Check | _Nested]]] = {
    "no_op": (dpe.NoOpDpEvent, {}),
    "non_private": (dpe.NonPrivateDpEvent, {}),
    "unsupported": (dpe.UnsupportedDpEvent, {}),
    "gaussian": (dpe.GaussianDpEvent, {"noise_multiplier": _noise}),
    "poisson_sampled": (
        dpe.PoissonSampledDpEvent,
        {"sampling_probability": _probability, "event": _EVENT},
    ),
    "sampled_without_replacement": (
        dpe.SampledWithoutReplacementDpEvent,
        {"source_dataset_size": _count, "sample_size": _count, "event": _EVENT},
    ),
    "self_composed": (dpe.SelfComposedDpEvent, {"event": _EVENT, "count": _count}),
    "composed": (dpe.ComposedDpEvent, {"events": _EVENTS}),
    "single_epoch_tree": (
        dpe.SingleEpochTreeAggregationDpEvent,
        {"noise_multiplier": _noise, "step_counts": _count},
    ),
    "mixture_of_gaussians": (
        dpe.MixtureOfGaussiansDpEvent,
        {"standard_deviation": _noise, "sensitivities": _numbers, "sampling_probs": _numbers},
    ),
    "zcdp": (dpe.ZCDpEvent, {"rho": _number(0, open_low=False), "xi": _number(0, open_low=False)}),
}
_NAMES = {cls: name for name, (cls, _) in _SCHEMA.items()}


def event_to_json(event: dpe.DpEvent) -> JsonObject:
    """Returns the JSON object of an event.

    >>> event_to_json(dpe.PoissonSampledDpEvent(0.5, dpe.GaussianDpEvent(2.0)))["type"]
    'poisson_sampled'

    Raises:
      ArtifactError: the event, or a nested event, is not supported, or a number in it is not finite
          or out of bounds.
    """
    return _write(event, 0)


def event_from_json(value: ToJson) -> dpe.DpEvent:
    """Returns the event of a JSON object.

    Raises:
      ArtifactError: unknown type, missing or extra field, number out of bounds, nested too deep.
    """
    return _read(value, 0)


def _too_deep(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ArtifactError(f"the event is nested deeper than {MAX_DEPTH} levels; {_REMEDY}")


def _write(event: dpe.DpEvent, depth: int) -> JsonObject:
    _too_deep(depth)
    name = _NAMES.get(type(event))
    if name is None:
        raise ArtifactError(
            f"unsupported DpEvent {type(event).__name__}; use one of {', '.join(_SCHEMA)}"
        )
    out: JsonObject = {"type": name}
    for field, check in _SCHEMA[name][1].items():
        value = getattr(event, field)
        if check is _Nested.EVENT:
            out[field] = _write(value, depth + 1)
        elif check is _Nested.EVENTS:
            out[field] = [_write(item, depth + 1) for item in value]
        else:
            checked = check(value, f"{name}.{field}")
            out[field] = "infinity" if checked == math.inf else cast("Json", checked)
    return out


def _read(value: object, depth: int) -> dpe.DpEvent:
    _too_deep(depth)
    fields = cast("dict[str, object]", dict(value)) if isinstance(value, Mapping) else {}
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in _SCHEMA:
        raise ArtifactError(f"unknown event type {name!r}; use one of {', '.join(_SCHEMA)}")
    cls, schema = _SCHEMA[name]
    if fields.keys() != schema.keys():
        raise ArtifactError(
            f"event {name} has fields {sorted(fields)}, expected {sorted(schema)}; {_REMEDY}"
        )
    arguments: dict[str, object] = {}
    for field, check in schema.items():
        item = fields[field]
        if check is _Nested.EVENT:
            arguments[field] = _read(item, depth + 1)
        elif check is _Nested.EVENTS:
            if not isinstance(item, list):
                raise ArtifactError(f"{name}.{field} is not a list; {_REMEDY}")
            arguments[field] = [_read(inner, depth + 1) for inner in cast("list[object]", item)]
        else:
            arguments[field] = check(item, f"{name}.{field}")
    return cls(**arguments)


def repeated(event: dpe.DpEvent, times: int) -> dpe.DpEvent:
    """Returns the event of several runs of one plan."""
    if isinstance(event, dpe.SelfComposedDpEvent):
        return dpe.SelfComposedDpEvent(event.event, event.count * times)
    return dpe.SelfComposedDpEvent(event, times)
