"""DpEvents as JSON: only the event types listed here can be read or written.

dp-accounting's own `from_named_tuple` imports any module that the data names, so it must never
receive external bytes. The shapes below are permanent: entries may be added, never changed, because
old ledgers must stay readable.
"""

# The numeric libraries ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import cast

from dp_accounting import dp_event as dpe

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import Json, JsonObject, ToJson

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
    "zcdp": (
        dpe.ZCDpEvent,
        {"rho": _number(0, open_low=False), "xi": _number(0, open_low=False)},
    ),
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
