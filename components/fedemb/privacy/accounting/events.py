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
from typing import Any, cast

from dp_accounting import dp_event as dpe

from fedemb.errors import ArtifactError
from fedemb.privacy.accounting.allocation import RandomAllocationDpEvent

_REMEDY = "pass an event as fedemb writes it"
MAX_DEPTH = 16
"""Maximum nesting depth of events."""
MAX_COUNT = 10**9
"""Maximum number of repetitions, and maximum population size."""

Json = dict[str, Any]
_Check = Callable[[Any, str], Any]


def _number(low: float, *, open_low: bool, high: float = math.inf) -> _Check:
    def check(value: Any, where: str) -> float:
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if ok:
            number = float(value)
            above = number > low if open_low else number >= low
            # An infinite upper bound still excludes infinity itself, and NaN fails every test.
            ok = above and number <= high and math.isfinite(number)
        if not ok:
            bracket = "(" if open_low else "["
            raise ArtifactError(
                f"{where} is {value!r}, expected a number in {bracket}{low:g}, {high:g}]; {_REMEDY}"
            )
        return float(value)

    return check


def _count(value: Any, where: str) -> int:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or not 1 <= value <= MAX_COUNT:
        raise ArtifactError(
            f"{where} is {value!r}, expected an integer in 1..{MAX_COUNT}; {_REMEDY}"
        )
    return int(value)


def _numbers(value: Any, where: str) -> list[float]:
    if not isinstance(value, list | tuple) or not value:
        raise ArtifactError(f"{where} is not a list of numbers; {_REMEDY}")
    check = _number(0, open_low=False)
    return [check(item, where) for item in cast("list[Any]", value)]


def _shape(value: Any, where: str) -> float:
    if value in ("infinity", math.inf):
        return math.inf
    return _number(0, open_low=False)(value, where)


_EVENT = object()
_EVENTS = object()
_noise = _number(0, open_low=True)
_probability = _number(0, open_low=True, high=1)

_SCHEMA: dict[str, tuple[type[dpe.DpEvent], dict[str, Any]]] = {
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
    "allocated": (RandomAllocationDpEvent, {"steps": _count, "event": _EVENT}),
    "zcdp": (
        dpe.ZCDpEvent,
        {"rho": _number(0, open_low=False), "xi": _number(0, open_low=False)},
    ),
    "repeat_and_select": (
        dpe.RepeatAndSelectDpEvent,
        {"event": _EVENT, "mean": _number(1, open_low=False), "shape": _shape},
    ),
}
_NAMES = {cls: name for name, (cls, _) in _SCHEMA.items()}


def event_to_json(event: dpe.DpEvent) -> Json:
    """Returns the JSON object of an event.

    >>> event_to_json(dpe.PoissonSampledDpEvent(0.5, dpe.GaussianDpEvent(2.0)))["type"]
    'poisson_sampled'

    Raises:
      ArtifactError: the event, or a nested event, is not supported, or a number in it is not finite
          or out of bounds.
    """
    return _write(event, 0)


def event_from_json(value: Any) -> dpe.DpEvent:
    """Returns the event of a JSON object.

    Raises:
      ArtifactError: unknown type, missing or extra field, number out of bounds, nested too deep.
    """
    return _read(value, 0)


def _too_deep(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ArtifactError(f"the event is nested deeper than {MAX_DEPTH} levels; {_REMEDY}")


def _write(event: Any, depth: int) -> Json:
    _too_deep(depth)
    name = _NAMES.get(type(event))
    if name is None:
        raise ArtifactError(
            f"unsupported DpEvent {type(event).__name__}; use one of {', '.join(_SCHEMA)}"
        )
    out: Json = {"type": name}
    for field, check in _SCHEMA[name][1].items():
        value = getattr(event, field)
        if check is _EVENT:
            out[field] = _write(value, depth + 1)
        elif check is _EVENTS:
            out[field] = [_write(item, depth + 1) for item in value]
        else:
            checked = check(value, f"{name}.{field}")
            out[field] = "infinity" if checked == math.inf else checked
    return out


def _read(value: Any, depth: int) -> dpe.DpEvent:
    _too_deep(depth)
    fields = cast("dict[str, Any]", dict(value)) if isinstance(value, Mapping) else {}
    name = fields.pop("type", None)
    if not isinstance(name, str) or name not in _SCHEMA:
        raise ArtifactError(f"unknown event type {name!r}; use one of {', '.join(_SCHEMA)}")
    cls, schema = _SCHEMA[name]
    if fields.keys() != schema.keys():
        raise ArtifactError(
            f"event {name} has fields {sorted(fields)}, expected {sorted(schema)}; {_REMEDY}"
        )
    arguments: Json = {}
    for field, check in schema.items():
        item = fields[field]
        if check is _EVENT:
            arguments[field] = _read(item, depth + 1)
        elif check is _EVENTS:
            if not isinstance(item, list):
                raise ArtifactError(f"{name}.{field} is not a list; {_REMEDY}")
            arguments[field] = [_read(inner, depth + 1) for inner in cast("list[Any]", item)]
        else:
            arguments[field] = check(item, f"{name}.{field}")
    return cls(**arguments)


def repeated(event: dpe.DpEvent, times: int) -> dpe.DpEvent:
    """Returns the event of several runs of one plan."""
    if isinstance(event, dpe.SelfComposedDpEvent):
        return dpe.SelfComposedDpEvent(event.event, event.count * times)
    return dpe.SelfComposedDpEvent(event, times)
