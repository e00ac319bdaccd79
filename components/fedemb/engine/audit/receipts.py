"""Noise receipts: regression of a round's output on its noise, redrawn from key and tag.

An output S + N, with N drawn independently of S with standard deviation s in each of d coordinates,
has slope 1 on N, up to about |S| / (s d). Noise that was discarded, scaled, drawn under another key
or scaled with the sum gives another slope for every data set. If sums are so large that the slope
is inaccurate (few weights, or a round of all users), replayed rounds give exact evidence
(`round_audit`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from fedemb.documents.audit import SIGMAS, Receipts
from fedemb.privacy.randomness.noise import Floats, gaussian, tensor_key

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan
    from fedemb.privacy.randomness.keyed_noise import CorrelatedStream

_DIGITS = 1e-5
"""Tolerance for committed means, which are float32."""


class ReceiptFigures(TypedDict):
    """Saved figures of the receipts so far. Raw."""

    rounds: int
    failed: int
    noise: float
    both: float
    rest: float


class NoiseReceipts:
    """Receipts of the rounds so far.

    Args:
      plan: plan of the run; its `noise_multiplier` is used unchanged.
      noise_key: `noise.run_key(root, "noise", ...)`.
      tags: tags of earlier rounds, if rounds share noise.
    """

    def __init__(self, plan: MechanismPlan, noise_key: bytes, tags: Sequence[bytes] = ()):
        self._plan, self._key = plan, noise_key
        self._stream: CorrelatedStream | None = None
        self._before = list(tags)
        self._rounds = self._failed = 0
        self._noise = self._both = self._rest = 0.0

    def add(self, mean: np.ndarray, tag: bytes) -> float:
        """Adds a round and returns its slope. Raw.

        Args:
          mean: committed mean, `[dim]`.
          tag: tag of its noise.
        """
        output = mean.astype(np.float64) * (self._plan.normalizer / self._plan.l2_norm_clip)
        known = self._known(tag, output.size)
        noise = self.drawn(tag, output.size) - known
        output -= known
        energy, both = float(noise @ noise), float(output @ noise)
        slope = both / energy
        rest = float(np.sum(np.square(output - slope * noise)))
        self._rounds += 1
        # Written so that NaN fails.
        self._failed += not abs(slope - 1) <= self._tolerance(energy, rest, output.size)
        self._noise, self._both, self._rest = (
            self._noise + energy,
            self._both + both,
            self._rest + rest * energy / output.size,
        )
        return slope

    def drawn(self, tag: bytes, size: int) -> Floats:
        """Redraws the noise of the next round on the sum / clip."""
        if not self._plan.tracks_participation:
            key = tensor_key(self._key, tag, "update")
            return gaussian(key, size) * self._plan.noise_multiplier
        return self._row(self._begin(size), tensor_key(self._key, tag, "update"))

    def _known(self, tag: bytes, size: int) -> Floats | float:
        """Returns a control variate if rounds share noise, else 0.

        The sums of a round may depend on the noise of earlier rounds, part of which is in this
        round. Noise with the same earlier part and another fresh part is subtracted from both sides
        of the regression; the difference is independent of the sums.
        """
        if not self._plan.tracks_participation:
            return 0.0
        key = tensor_key(self._key, tag, "another")
        return self._row(copy.deepcopy(self._begin(size)), key)

    def _begin(self, size: int) -> CorrelatedStream:
        if self._stream is None:
            self._stream = self._plan.noise_stream(size)
            assert self._stream is not None, "rounds of this plan share no noise"
            for earlier in self._before:
                self._stream.next(tensor_key(self._key, earlier, "update"))
        return self._stream

    def _row(self, stream: CorrelatedStream, key: bytes) -> Floats:
        return stream.next(key) / 2.0**self._plan.grid_bits

    def _tolerance(self, energy: float, rest: float, size: int) -> float:
        return SIGMAS * math.sqrt(rest / size / energy) + _DIGITS

    @property
    def found(self) -> Receipts:
        """Returns the result of the rounds so far."""
        if not self._noise > 0:
            return Receipts(rounds=self._rounds, failed=self._failed, together=False)
        tolerance = SIGMAS * math.sqrt(self._rest) / self._noise + _DIGITS
        slope = self._both / self._noise
        together = abs(slope - 1) <= tolerance
        return Receipts(rounds=self._rounds, failed=self._failed, together=together)

    def to_json(self) -> ReceiptFigures:
        """Returns the figures so far. Raw."""
        return {
            "rounds": self._rounds,
            "failed": self._failed,
            "noise": self._noise,
            "both": self._both,
            "rest": self._rest,
        }

    def restore(self, figures: ReceiptFigures) -> None:
        """Resumes after the rounds that `to_json` covered."""
        self._rounds, self._failed = figures["rounds"], figures["failed"]
        self._noise, self._both, self._rest = figures["noise"], figures["both"], figures["rest"]
