"""Rules that define which values name the same user, class or cohort, in all formats and shards.

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

Keyed hashes that assign users to block, split and virtual client, fixed for a policy's life.

The key is the policy's partition key (`keys/`). Without the key it is unknown which users share a
virtual client, are held out, or are in a block. A user's assignment is the same in every run. It
does not depend on order, counts or other users, so removing a user changes only one virtual client
per grouping (docs/privacy/sensitivity.md#rule-a).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import unicodedata
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from fedemb.keys import derive, open_key_store, partition_key

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


KEY_BYTES = 8
"""Bytes of a user key. Two users who collide are treated, and protected, as one."""
DIGEST_BYTES = 16
_WORD = 8
LEAST_CLASSES = 2
"""Minimum number of held-out classes, because different-class pairs need two."""
_PURPOSES = ("user", "user_split", "class", "class_split", "bucket", "group", "image")


@dataclass(frozen=True)
class KeyRef:
    """Reference from which workers fetch the partition key; the Beam graph has no key."""

    keys_uri: str
    policy_id: str
    throwaway: bytes = b""
    """Key used instead of the store if not empty, for previews without a policy."""

    def hasher(self) -> Hasher:
        """Fetches the key.

        Raises:
          StorageError: the key store cannot be read.
        """
        if self.throwaway:
            return Hasher(self.throwaway)
        return Hasher(partition_key(open_key_store(self.keys_uri), self.policy_id))


class Hasher:
    """Keyed hashes of names, one subkey per purpose."""

    def __init__(self, key: bytes):
        self._keys = {purpose: derive(key, purpose) for purpose in _PURPOSES}

    def _word(self, purpose: str, message: bytes) -> int:
        return int.from_bytes(hmac.digest(self._keys[purpose], message, "sha256")[:_WORD], "big")

    def user_key(self, user_id: str) -> bytes:
        """Returns the 64-bit key of a canonical user ID, big-endian: bytes sort as numbers."""
        return hmac.digest(self._keys["user"], user_id.encode(), "sha256")[:KEY_BYTES]

    def holds_out_user(self, user_key: bytes, fraction: float) -> bool:
        """Returns whether the user is held out for evaluation, permanently."""
        return self._word("user_split", user_key) < fraction * 2.0**64

    def holds_out_class(self, label: str, fraction: float) -> bool:
        """Returns whether a shared class is held out for evaluation, permanently."""
        return self._word("class_split", label.encode()) < fraction * 2.0**64

    def held_out_classes(self, labels: Collection[str], fraction: float) -> frozenset[str]:
        """Returns the share of classes held out for evaluation, permanently; at least two."""
        ranked = sorted(labels, key=lambda label: self._word("class_split", label.encode()))
        return frozenset(ranked[: max(LEAST_CLASSES, round(fraction * len(ranked)))])

    def class_id(self, label: str, user_key: bytes) -> int:
        """Returns the signed 64-bit number of a class; empty `user_key`: a class of all users."""
        word = self._word("class", len(user_key).to_bytes(1, "big") + user_key + label.encode())
        return word - (1 << 63)

    def bucket(self, user_key: bytes, buckets: int) -> int:
        """Returns the hash bucket of the user's ledger block."""
        return self._word("bucket", user_key) % buckets

    def image_digest(self, pixels: np.ndarray) -> bytes:
        """Returns the keyed digest of model input pixels, which identifies and orders images."""
        key = self._keys["image"]
        return hashlib.blake2b(pixels.data, digest_size=DIGEST_BYTES, key=key).digest()

    def groups(
        self, user_keys: Sequence[bytes], groupings: int, virtual_clients: int
    ) -> Iterator[np.ndarray]:
        """Yields the virtual clients of users for each grouping in order, uint32 [users].

        Word `r` of the user's hash stream decides grouping `r`, so adding groupings does not change
        the first ones. The bias of `mod` is below virtual_clients / 2^64.
        """
        key = self._keys["group"]
        for first in range(0, groupings, 4):
            block = (first // 4).to_bytes(4, "big")
            stream = b"".join(
                [hmac.digest(key, user_key + block, "sha256") for user_key in user_keys]
            )
            words = np.frombuffer(stream, ">u8").reshape(len(user_keys), 4)
            for word in range(min(4, groupings - first)):
                yield (words[:, word] % np.uint64(virtual_clients)).astype(np.uint32)


def shard_of(word: bytes, shards: int) -> int:
    """Returns the range of the 64-bit hash space that contains a key; ranges ascend with the key.

    >>> [shard_of(bytes([first] + [0] * 7), 4) for first in (0, 63, 64, 255)]
    [0, 0, 1, 3]
    """
    return int.from_bytes(word[:_WORD], "big") * shards >> 64
