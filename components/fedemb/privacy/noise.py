"""Normals and coins from ciphers, and the keyed noise of a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from jaxtyping import Bool, Float64, Int64, UInt64

from fedemb.errors import ArtifactError
from fedemb.keys import derive
from fedemb.privacy.group_mechanisms import TreeAggregation
from fedemb.privacy.mechanism import MechanismPlan

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

TOTAL_VARIATION_PER_NORMAL = 2.0**-91
"""Upper bound of the uniform's mass below 2^-92 (coarser than the grid) and the missing tail."""
MAX_NORMALS = 2**40
"""Maximum normals of one run: 2^40 * 2^-91 = 2^-51, `guarantee.SAMPLER_TOTAL_VARIATION`."""

_BLOCK = 1 << 16
"""Normals per block; part of the definition of the stream."""
_POOL_FROM = 4 * _BLOCK
"""Minimum number of normals for threads."""
_NORMAL, _COIN = 1, 2


def gaussian(key: bytes, size: int) -> Float64[np.ndarray, "{size}"]:
    """Returns `[size]` independent standard normals, a function of only key and size.

    Args:
      key: 32 secret bytes, never used for anything else.
      size: number of normals.

    >>> gaussian(bytes(32), 3).tolist() == gaussian(bytes(32), 3).tolist()
    True
    """
    out = np.empty(size, dtype=np.float64)

    def fill(start: int) -> None:
        part = out[start : start + _BLOCK]
        _box_muller(key, start // _BLOCK, part)

    _for_blocks(fill, size)
    return out


def add_rounded_noise(
    values: Int64[np.ndarray, " dim"], key: bytes, scale: float
) -> Int64[np.ndarray, " dim"]:
    """Returns integers plus normals of standard deviation `scale`, rounded to integers.

    Rounding is post-processing: value + round(noise) = round(value + noise), as value is an
    integer.

    Args:
      values: `[size]` exact sums.
      key: noise key of these values.
      scale: standard deviation in units of the grid.
    """
    out = np.empty_like(values)

    def fill(start: int) -> None:
        part = slice(start, min(start + _BLOCK, values.size))
        noise = np.empty(part.stop - part.start, dtype=np.float64)
        _box_muller(key, start // _BLOCK, noise)
        noise *= scale
        np.rint(noise, out=noise)
        np.add(values[part], noise.astype(np.int64), out=out[part])

    _for_blocks(fill, values.size)
    return out


def coins(key: bytes, size: int) -> UInt64[np.ndarray, "{size}"]:
    """Returns `[size]` uniform 64-bit words; word i is the coin of virtual client (or user) i."""
    return np.frombuffer(_keystream(key, _COIN, 0, 8 * size), dtype="<u8").astype(np.uint64)


def coin_threshold(probability: float) -> int:
    """Returns the threshold below which words are heads: floor(probability * 2^64)."""
    return int(Fraction(probability) * 2**64)


def heads(words: UInt64[np.ndarray, " words"], probability: float) -> Bool[np.ndarray, " words"]:
    """Returns which coins come up heads, `[size]`."""
    threshold = coin_threshold(probability)
    if threshold >= 2**64:
        return np.ones(words.shape, dtype=np.bool_)
    return words < np.uint64(threshold)


def run_key(root_key: bytes, purpose: str, run_id: str, attempt: int, inputs_sha: str) -> bytes:
    """Returns the subkey of one attempt for `coins` or `noise`."""
    return derive(root_key, f"{purpose}/1", run_id, str(attempt), inputs_sha)


def round_tag(noise_key: bytes, round_index: int, sums: Integers) -> bytes:
    """Returns the synthetic nonce of a round: a keyed digest of every integer that is noised in it.

    Equal sums give the same tag and the same noise, so there is nothing to average. Any difference
    gives an independent tag, so there is nothing to cancel. Without the root key, a tag reveals
    nothing.

    Args:
      noise_key: `run_key(..., "noise", ...)`.
      round_index: the round.
      sums: the exact sums, `[size]`.
    """
    digest = hashlib.sha256(f"{sums.size}:".encode())
    digest.update(np.ascontiguousarray(sums, dtype="<i8").data)
    return derive(noise_key, "round", str(round_index), digest.digest())


def tensor_key(noise_key: bytes, tag: bytes, name: str) -> bytes:
    """Returns the key of the normals of one quantity in the round of the tag.

    A replayed round has the same output, so averaging gains nothing. Other data gets independent
    noise, so subtracting gains nothing (docs/privacy/noise.md#keys-of-a-round).
    """
    return derive(noise_key, "normals", tag, name)


def _keystream(key: bytes, domain: int, block: int, size: int) -> bytes:
    # Initial block counter (4 bytes), then the 12-byte nonce: domain and block number.
    nonce = bytes(4) + domain.to_bytes(4, "little") + block.to_bytes(8, "little")
    return Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(size))


def _box_muller(key: bytes, block: int, out: Floats) -> None:
    pairs = (out.size + 1) // 2
    words = np.frombuffer(_keystream(key, _NORMAL, block, 24 * pairs), dtype="<u8")
    high, low, angle = words.reshape(3, pairs)
    # The uniform is its distance from the nearer end of (0, 1): all 128 bits count at either end, #
    # while a float64 just below 1 has no digits past 2^-53.
    mirrored = np.negative(high >> np.uint64(63))
    distance = ((low ^ mirrored).astype(np.float64) + 1.0) * 2.0**-64
    distance += high ^ mirrored
    distance *= 2.0**-64
    radius = np.log(distance)
    above = np.flatnonzero(mirrored)
    radius[above] = np.log1p(-distance[above])
    radius *= -2.0
    np.sqrt(radius, out=radius)
    turn = angle.astype(np.float64)
    turn *= 2.0 * np.pi * 2.0**-64
    np.multiply(radius, np.cos(turn), out=out[:pairs])
    np.multiply(radius[: out.size - pairs], np.sin(turn[: out.size - pairs]), out=out[pairs:])


_POOL: list[ThreadPoolExecutor] = []


def _for_blocks(fill: Callable[[int], None], size: int) -> None:
    starts = range(0, size, _BLOCK)
    if size < _POOL_FROM:
        for start in starts:
            fill(start)
        return
    if not _POOL:
        _POOL.append(ThreadPoolExecutor(max_workers=os.cpu_count() or 1))
    list(_POOL[0].map(fill, starts))


class TagChain:
    """Tags of the rounds so far, in order, and a digest of all of them that each round extends.

    Args:
      tags: tags of the first rounds.
    """

    def __init__(self, tags: Iterable[bytes] = ()):
        self.tags: list[bytes] = []
        self.sha = hashlib.sha256().hexdigest()
        """SHA-256 of the digest before the last tag and that tag, hex."""
        for tag in tags:
            self.append(tag)

    def append(self, tag: bytes) -> None:
        """Adds the tag of the next round."""
        self.tags.append(tag)
        self.sha = hashlib.sha256(bytes.fromhex(self.sha) + tag).hexdigest()

    def check(self, sha: str | None) -> None:
        """Checks that a record was made after the rounds of these tags.

        Args:
          sha: digest in the record; None: its noise does not depend on other rounds.

        Raises:
          ArtifactError: a record is missing, or belongs to other rounds.
        """
        if sha is not None and sha != self.sha:
            raise ArtifactError(
                f"The record of round {len(self.tags) - 1} does not follow the rounds before it. "
                "Restore the working state from a backup, or start a run with a new id."
            )


class TreeStream:
    """The increments of tree noise: nodes that cover the rounds so far, minus the previous nodes.

    Round t (from 1) of a tree closes one node, of 2^level rounds with level the number of trailing
    zeros of t, and the nodes below it are no longer needed. A node's noise is drawn in the round
    that closes it, under that round's key and the number of nodes before it.
    """

    def __init__(self, plan: TreeAggregation, size: int):
        self._leaves, self._size = plan.restart_every or plan.rounds, size
        self._stddev, self._round = grid_scale(plan), 0
        self._cover: list[tuple[int, Integers]] = []
        """Level and noise of the nodes that cover the tree so far, largest first."""

    def next(self, key: bytes) -> Integers:
        """Returns the noise of the next round, `[size]`; fresh normals come from `key`."""
        zeros = np.zeros(self._size, dtype=np.int64)
        place = self._round % self._leaves + 1
        if place == 1:
            self._cover = []  # new tree; values of the previous tree keep their noise
        level = (place & -place).bit_length() - 1
        number = self._round + self._round // self._leaves
        node = add_rounded_noise(zeros, derive(key, "node", str(number)), self._stddev)
        before = zeros.copy()
        while self._cover and self._cover[-1][0] < level:
            before += self._cover.pop()[1]
        self._cover.append((level, node))
        self._round += 1
        return node - before


def grid_scale(plan: MechanismPlan) -> float:
    """Returns the standard deviation of the noise on the sum, in units of the grid."""
    return plan.noise_multiplier * 2.0**plan.grid_bits
