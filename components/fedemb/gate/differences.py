"""Comparison of two JSON values."""

from __future__ import annotations

import math

from fedemb.foundation.canonical_json import Json

RELATIVE_TOLERANCE = 1e-6
"""Relative tolerance of recomputed floats, for rounding differences between machines."""


LATER_TOLERANCE = 0.01
"""Relative tolerance of recomputed floats with a later version of the accounting library."""


def differences(
    expected: Json, found: Json, path: str = "", *, tolerance: float = RELATIVE_TOLERANCE
) -> list[str]:
    """Returns the paths at which two JSON values differ; floats may differ by rounding.

    >>> differences({"a": 1.0, "b": [1]}, {"a": 1.0000000001, "b": [2], "c": 0})
    ['b.0', 'c']
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        differing: list[str] = []
        for key in sorted({*expected, *found}):
            inner = f"{path}.{key}".lstrip(".")
            if key in expected and key in found:
                differing += differences(expected[key], found[key], inner, tolerance=tolerance)
            else:
                differing.append(inner)
        return differing
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            item
            for index, pair in enumerate(zip(expected, found, strict=True))
            for item in differences(*pair, f"{path}.{index}".lstrip("."), tolerance=tolerance)
        ]
    if type(expected) is float and type(found) is float:
        close = math.isclose(expected, found, rel_tol=tolerance)
        return [] if close else [path]
    return [] if type(expected) is type(found) and expected == found else [path]
