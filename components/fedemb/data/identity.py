r"""Rules that define which values name the same user, class or cohort, in all formats and shards.

Rule `nfkc-number/2`:

- Text is UTF-8. Invisible characters are removed, white space is trimmed and collapsed, and Unicode
  forms are unified (NFKC). Case, leading zeros and a plus sign are kept: `Ada` is not `ada`, `007`
  is not `7`.
- A whole number has one name for all types: `7`, `7.0`, `b"7"`, `"7"` and `"7.0"` are `7`, because
  many tools write a column with a missing ID as decimals.
- A decimal number that lost digits is not a valid name: beyond 2**53 (2**24 in single precision)
  several IDs are the same number. Such numbers are floats and texts like `9007199254740994.0`,
  `1.5e+16` and `1.23457E+11`. To fix this, write IDs as text.
- Null, NaN, empty text, and bytes that are not UTF-8 (a raw UUID) are not valid names.

Merging too many users is the safe error: two people with one name are protected together.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Hashable
from decimal import Decimal
from functools import lru_cache
from typing import TypeAlias

_INVISIBLE = ("Cc", "Cf", "Cs")
"""Invisible Unicode categories: control, format (zero width), lone surrogates."""
_EXACT, _EXACT_SINGLE = 2**53, 2**24
"""Limits above which a float of double or single precision can represent several integers."""
_MOST_DIGITS = 100
"""Digits of a number, more than any column type has; longer decimals are inexact."""
_WHOLE = re.compile(r"(-?)(0|[1-9][0-9]*)\.0+")
_EXPONENT = re.compile(r"-?[0-9](\.[0-9]+)?[eE]\+[0-9]{2,}")
"""Large number as printed by NumPy, pandas and spreadsheets. `12e45` may be part of a digest."""

Cell: TypeAlias = object
"""Value of a record as its file has it: a Python or NumPy scalar, bytes, text, or anything else."""
MISSING, INEXACT, NOT_TEXT = "user_id_missing", "user_id_inexact", "user_id_not_text"
"""Reasons why a value is not a user ID; see the rule."""


class SinglePrecision(float):
    """A value of a column of single or half precision."""


RULE = "nfkc-number/2"
"""Name of the rule, which the terms of a policy hold."""


def name_text(value: Cell) -> str | None:
    """Returns the canonical spelling of a value; None if it is not a valid name."""
    value = _plain(value)
    return None if value is None else _number_text(value)


def name_problem(value: Cell) -> str:
    """Returns the reason why a value for which `name_text` is None is not a user ID."""
    value = _plain(value)
    if isinstance(value, bytes) and not _is_utf8(value):
        return NOT_TEXT
    number = isinstance(value, float) and not math.isnan(value)
    return INEXACT if number or canonical_text(value) else MISSING


def is_whole_decimal(value: Cell) -> bool:
    """Returns whether a value is a whole number written as a decimal."""
    value = _plain(value)
    if isinstance(value, float | Decimal):
        return True
    text = canonical_text(value) if isinstance(value, str | bytes) else None
    return text is not None and _WHOLE.fullmatch(text) is not None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _plain(value: Cell) -> Hashable:
    """Returns a hashable value; None for lists and objects, which are not valid names."""
    if isinstance(value, dict | list | tuple | bytearray):
        return None
    item = getattr(value, "item", None)
    if item is not None:
        single = getattr(getattr(value, "dtype", None), "itemsize", 8) < 8
        found: Hashable = item()
        return SinglePrecision(found) if single and isinstance(found, float) else found
    if isinstance(value, Decimal) and value.is_snan():  # no hash
        return None
    return value if isinstance(value, Hashable) else None


@lru_cache(1 << 16, typed=True)
def _number_text(value: Hashable) -> str | None:
    if isinstance(value, float):
        limit = _EXACT_SINGLE if isinstance(value, SinglePrecision) else _EXACT
        if not abs(value) < limit:  # infinite and NaN too
            return None
    if isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() > _MOST_DIGITS:
            return None
        if value == int(value):
            return str(int(value))
    text = canonical_text(value)
    if text is None or _EXPONENT.fullmatch(text):
        return None
    if whole := _WHOLE.fullmatch(text):
        number = int(whole[2][:_MOST_DIGITS])  # Python converts up to 4,300 digits
        return None if number >= _EXACT else str(-number if whole[1] else number)
    return text


def canonical_text(value: Cell) -> str | None:
    r"""Returns the spelling of a value as text, used for file names.

    >>> canonical_text("  Ada\u00a0Lo\u0308we "), canonical_text(7.0), canonical_text("")
    ('Ada Löwe', '7', None)
    """
    value = _plain(value)
    return None if value is None else _stripped(value)


@lru_cache(1 << 16, typed=True)
def _stripped(value: Hashable) -> str | None:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() else repr(float(value))
    if isinstance(value, bytes):
        if not _is_utf8(value):
            return None
        value = value.decode()
    text = str(value)
    if not (text.isascii() and text.isalnum()):
        text = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
        text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text or None
