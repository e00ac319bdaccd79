"""DP-SGD of a head only, on features of a frozen backbone.

The norm of a record is computed from features and errors, and the clipped sum is one matrix product
(`privacy.queries.product_sum`). A round needs two products and the noise.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import cast

import numpy as np

from fedemb.config import UnitGradientConfig
from fedemb.engine.feature_cache import UnitFeatures, row_type
from fedemb.engine.rounds import RoundSums, Slab
from fedemb.engine.server import MeanStep, ServerRule
from fedemb.errors import ConfigError
from fedemb.models.arrays import Model
from fedemb.models.classifier import HEAD
from fedemb.privacy.queries import Mechanism, Parameters
from fedemb.privacy.queries.product_sum import (
    Features,
    WholeWeights,
    clipped_product_sum,
    exact_logits,
    most_units,
    whole_weights,
)

_CHUNK_BYTES = 4 << 20
"""Bytes of features in one matrix product, float64; about the cache of a core."""
_Packed = tuple[np.ndarray, np.ndarray]
"""Rows of images, and their weights in the mean of their unit, `[units, images]` each. Raw."""
SlabSum = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Sum of packed units, int64 `[dim]`; their norms and mean losses, `[units]`. Raw."""


class HeadGradientFunction:
    """Sums the clipped mean gradients of the head over the units of a round.

    Implements `TrainingRound`.

    Args:
      classifier: `keras.Model` from `build_classifier`; not changed by rounds.
      mechanism: mechanism of the training.
      config: images of a unit.

    Raises:
      ConfigError: views are configured, or a unit has too many
        images for an exact sum.
    """

    def __init__(self, classifier: Model, mechanism: Mechanism, config: UnitGradientConfig) -> None:
        head = classifier.get_layer(HEAD)
        if config.views > 1 or config.flip or config.crop_padding:
            raise ConfigError(
                "model.trainable=head does not support views, because features are computed once. "
                "Set training.unit_gradient.views: 1, flip: false and crop_padding: 0."
            )
        self.mechanism, self._config = mechanism, config
        self.variables = [head.kernel, head.bias]
        self._rows, self._classes = head.kernel.shape[0] + 1, head.kernel.shape[1]
        self.dim = self._rows * self._classes
        self.seconds_waited = 0.0
        images = config.images_per_unit
        held = max(1, _CHUNK_BYTES // (8 * self._rows * images))
        self._chunk = min(held, most_units(images, mechanism.plan.grid_bits))

    def initial_weights(self) -> np.ndarray:
        """Returns kernel, then bias, float32 `[dim]`."""
        return np.concatenate([v.numpy().ravel() for v in self.variables]).astype(np.float32)

    def slabs(self, units: Iterable[UnitFeatures], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round in chunks; units without images contribute nothing."""
        del round_index  # nothing here is random
        waiting = iter(units)
        while taken := list(islice(waiting, self._chunk)):
            if filled := [unit for unit in taken if len(unit)]:
                yield Slab(self._pack(filled))

    def _pack(self, units: Sequence[UnitFeatures]) -> _Packed:
        """Returns image rows and their weights in the mean of their unit, `[units, images]`."""
        images = self._config.images_per_unit
        buffers = cast("Sequence[bytes]", units)  # an array is one
        joined = np.frombuffer(b"".join(buffers), row_type(self._rows - 1))
        counts = np.fromiter(map(len, units), np.int64, len(units))
        weights = np.arange(images) < counts[:, None]
        if images == 1 and len(joined) == len(units):
            return joined[:, None], weights.astype(np.float64)
        ends = np.cumsum(counts)
        number = np.arange(len(joined)) - np.repeat(ends - counts, counts)
        slab = np.zeros((len(units), images), joined.dtype)
        slab["scale"] = 1.0
        slab[weights] = joined[number < images]
        return slab, weights / weights.sum(1, keepdims=True)

    def __call__(
        self, weights: np.ndarray, units: Iterable[UnitFeatures], round_index: int
    ) -> RoundSums:
        """Returns the clipped sum of one round; `weights` is the head, float32 `[dim]`."""
        parameters = self.mechanism.clip
        return self.run(weights, self.slabs(units, round_index), parameters)

    def run(self, weights: np.ndarray, slabs: Iterable[Slab], parameters: Parameters) -> RoundSums:
        """Returns the clipped sum of one round from packed units; see `SlabRounds.run`."""
        del parameters  # the clip is constant
        sum_of = self._sum_at(weights)
        total = np.zeros(self.dim, np.int64)
        rows = [np.zeros((0, 4), np.float32)]
        self.seconds_waited, asked = 0.0, time.perf_counter()
        for slab in slabs:
            self.seconds_waited += time.perf_counter() - asked
            images, shares = cast("_Packed", slab)
            summed, norms, losses = sum_of(images, shares)
            total += summed
            counts = np.count_nonzero(shares, axis=1)
            rows.append(np.stack([norms, losses, losses, counts], axis=1).astype(np.float32))
            asked = time.perf_counter()
        return RoundSums((total,), np.concatenate(rows))

    def _sum_at(self, weights: np.ndarray) -> Callable[[np.ndarray, np.ndarray], SlabSum]:
        """Returns the clipped sum of packed units as a function of images and their weights."""
        return partial(self._sum, whole_weights(weights.reshape(self._rows, self._classes)))

    def _sum(self, head: WholeWeights, images: np.ndarray, shares: np.ndarray) -> SlabSum:
        features = Features(images["mantissas"].astype(np.float64), images["scale"])
        errors, losses = self._errors(head, features, images["label"], shares)
        summed, norms = clipped_product_sum(
            features,
            errors,
            l2_norm_clip=self.mechanism.plan.l2_norm_clip,
            grid_bits=self.mechanism.plan.grid_bits,
        )
        return summed, norms, losses

    def _errors(
        self, head: WholeWeights, features: Features, labels: np.ndarray, shares: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns negative errors `[units, images, classes]` and mean losses `[units]`."""
        flat = Features(features.mantissas.reshape(-1, self._rows), features.scales.ravel())
        logits = exact_logits(flat, head).reshape(*labels.shape, self._classes)
        logits = logits - logits.max(-1, keepdims=True)
        powers = np.exp(logits)
        sums = powers.sum(-1, keepdims=True)
        wanted = labels[..., None] == np.arange(self._classes)
        losses = np.log(sums[..., 0]) - (logits * wanted).sum(-1)
        return (wanted - powers / sums) * shares[..., None], (losses * shares).sum(1)

    @property
    def advance(self) -> ServerRule:
        """Server step on the noised mean."""
        plan = self.mechanism.plan
        return MeanStep(plan.rounds, plan.l2_norm_clip)
