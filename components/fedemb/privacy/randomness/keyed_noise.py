"""The noise of a run, derived by key from all inputs and from the sums that it hides.

The engine makes one object per attempt. `begin` sets the tag of the round from every integer that
will be noised in the round; `add` then draws the noise of one of them. A replayed round has the
same output, so averaging gains nothing. Other data gets independent noise, so subtracting gains
nothing
(docs/privacy/noise.md#keys-of-a-round).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from typing_extensions import override

from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.keys import derive
from fedemb.privacy.randomness.noise import (
    MAX_NORMALS,
    Integers,
    add_rounded_noise,
    round_tag,
    tensor_key,
)


class CorrelatedStream(Protocol):
    """Noise whose rows depend on earlier rows."""

    def next(self, key: bytes) -> Integers:
        """Returns the noise of the next round, `[size]`; fresh normals come from `key`."""
        ...


class NoisePlan(Protocol):
    """Parameters and stream that a noise source reads from the plan of a mechanism."""

    @property
    def kind(self) -> str:
        """Name of the mechanism."""
        ...

    @property
    def rounds(self) -> int:
        """Planned rounds."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum / clip."""
        ...

    @property
    def grid_bits(self) -> int:
        """Updates and noise are multiples of clip / 2^grid_bits."""
        ...

    def noise_stream(self, size: int) -> CorrelatedStream | None:
        """Returns correlated noise of vectors of `size`; None if rounds are independent."""
        ...


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


class KeyedNoise:
    """Noise source of one attempt; its state is a list of tags, useless without the key.

    Args:
      plan: the mechanism.
      noise_key: `noise.run_key(root, "noise", ...)`.
    """

    def __init__(self, plan: NoisePlan, noise_key: bytes):
        self._plan = plan
        self._key = noise_key
        self._stream: CorrelatedStream | None = None
        self.tag = b""
        """Tag of the last round: a keyed digest of the noised integers."""
        self.chain = TagChain()
        """Tags of the rounds so far; kept only if later noise depends on them."""

    @property
    def tags(self) -> list[bytes]:
        """Tags of the rounds so far, in order; kept only if later noise depends on them."""
        return self.chain.tags

    def begin(self, round_index: int, quantities: dict[str, Integers]) -> None:
        """Fixes the tag of a round.

        Args:
          round_index: the round.
          quantities: every integer quantity that will be noised in this round.

        Raises:
          PlanMismatch: too many values: the noise sampler's share of delta would be exceeded.
        """
        self.require_drawable(sum(values.size for values in quantities.values()))
        self.tag = round_tag(self._key, round_index, quantities)

    def require_drawable(self, size: int) -> None:
        """Raises PlanMismatch if so many values per round exceed the sampler's share of delta."""
        # A tree draws at most two nodes per round.
        if 2 * size * self._plan.rounds > MAX_NORMALS:
            raise PlanMismatch(
                f"{self._plan.rounds} rounds of {size} values exceed the {MAX_NORMALS} normals the "
                "noise sampler is accounted for; lower rounds"
            )

    def add(self, name: str, values: Integers, scale: float) -> Integers:
        """Returns values plus rounded normals of standard deviation `scale` grid units."""
        return add_rounded_noise(values, tensor_key(self._key, self.tag, name), scale)

    def add_correlated(self, name: str, values: Integers) -> Integers:
        """Returns values plus the next row of the correlated noise; earlier rows are redrawn."""
        if self._stream is None:
            self._stream = self._plan.noise_stream(values.size)
            assert self._stream is not None, f"{self._plan.kind} has no correlated noise"
            for tag in self.tags:
                self._stream.next(tensor_key(self._key, tag, name))
        self.chain.append(self.tag)
        return values + self._stream.next(tensor_key(self._key, self.tag, name))

    def restore(self, tags: list[bytes]) -> None:
        """Resumes after the rounds of these tags; their noise is redrawn when needed."""
        self.chain, self._stream = TagChain(tags), None


class TreeStream(CorrelatedStream):
    """The increments of tree noise: nodes that cover the rounds so far, minus the previous nodes.

    Round t (from 1) of a tree closes one node, of 2^level rounds with level the number of trailing
    zeros of t, and the nodes below it are no longer needed. A node's noise is drawn in the round
    that closes it, under that round's key and the number of nodes before it.
    """

    def __init__(self, leaves: int, stddev: float, size: int):
        self._leaves, self._stddev, self._size = leaves, stddev, size
        self._round = 0
        self._cover: list[tuple[int, Integers]] = []
        """Level and noise of the nodes that cover the tree so far, largest first."""

    @override
    def next(self, key: bytes) -> Integers:
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


def grid_scale(plan: NoisePlan) -> float:
    """Returns the standard deviation of the noise on the sum, in units of the grid."""
    return plan.noise_multiplier * 2.0**plan.grid_bits
