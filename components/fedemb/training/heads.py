"""Rounds of the last layer only, on features of a frozen backbone."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

import numpy as np
from typing_extensions import override

from fedemb.config import ServerConfig, UnitGradientConfig
from fedemb.errors import ConfigError
from fedemb.foundation.cores import on_all_cores
from fedemb.models.backbones import HEAD
from fedemb.models.keras_backend import Model
from fedemb.privacy.feature_sums import (
    CONSTANT,
    COVARIANCE_NORM,
    Features,
    WholeWeights,
    certainty_records,
    clipped_product_sum,
    covariance_record,
    covariance_size,
    exact_logits,
    most_units,
    solve_temperature,
    solve_whitening,
    whole_weights,
)
from fedemb.privacy.running import Mechanism
from fedemb.training.feature_cache import row_type
from fedemb.training.rounds import RoundSums, Slab, TrainingRound, Unit, UnitFeatures
from fedemb.training.server import ServerState, released_weights, solved_state

_CHUNK_BYTES = 4 << 20
"""Bytes of features in one matrix product, float64; about the cache of a core."""
_Packed = tuple[np.ndarray, np.ndarray, bool]
"""Rows of images, and their weights in the mean of their unit, `[units, images]` each; and whether
the round measures the temperature. Raw."""
SlabSum = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Sum of packed units, int64 `[dim]`; their norms and mean losses, `[units]`. Raw."""


class HeadGradientFunction(TrainingRound):
    """Sums the clipped mean gradients of the head over the units of a round.

    The gradients are of the kernel and of bias / `CONSTANT`, so the bias moves by `CONSTANT` times
    the noised mean.

    The last of several rounds measures by how much the head is too certain, with the same clip and
    noise. The released head is divided by the temperature that follows.

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
        self._config = config
        self.variables = [head.kernel, head.bias]
        self._rows, self._classes = head.kernel.shape[0] + 1, head.kernel.shape[1]
        super().__init__(mechanism, self._rows * self._classes)
        self._last = mechanism.plan.rounds - 1
        images = config.images_per_unit
        held = max(1, _CHUNK_BYTES // (8 * self._rows * images))
        self._chunk = min(held, most_units(images, mechanism.plan.grid_bits))

    @override
    def slabs(self, units: Iterable[Unit], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round in chunks; units without images contribute nothing."""
        measures = round_index == self._last > 0
        waiting = iter(cast("Iterable[UnitFeatures]", units))
        while taken := list(islice(waiting, self._chunk)):
            if filled := [unit for unit in taken if len(unit)]:
                yield Slab((*self._pack(filled), measures))

    def _pack(self, units: Sequence[UnitFeatures]) -> tuple[np.ndarray, np.ndarray]:
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

    @override
    def _sums(self, weights: np.ndarray, slabs: Iterable[Slab]) -> RoundSums:
        head = whole_weights(weights.reshape(self._rows, self._classes))
        total = np.zeros(self.dim, np.int64)
        rows = [np.zeros((0, 4), np.float32)]

        def sum_of(slab: Slab) -> tuple[np.ndarray, np.ndarray]:
            images, shares, measures = cast("_Packed", slab)
            act = self._certainty if measures else self._sum
            summed, norms, losses = act(head, images, shares)
            counts = np.count_nonzero(shares, axis=1)
            return summed, np.stack([norms, losses, losses, counts], axis=1).astype(np.float32)

        for summed, units in on_all_cores(sum_of, slabs):
            total += summed
            rows.append(units)
        return RoundSums(total, np.concatenate(rows))

    @override
    def advance(self, server: ServerConfig, state: ServerState, mean: np.ndarray) -> ServerState:
        """Steps; the last of several rounds divides the released head by its temperature."""
        if state.rounds == self._last > 0:
            head = state.weights / np.float32(solve_temperature(mean))
            return solved_state(server, head, state.rounds + 1)
        step = mean.reshape(self._rows, self._classes).copy()
        step[-1] *= CONSTANT
        state = super().advance(server, state, step.ravel())
        measured = state.rounds == self._last
        return replace(state, weights=released_weights(server, state)) if measured else state

    def _certainty(self, head: WholeWeights, images: np.ndarray, shares: np.ndarray) -> SlabSum:
        """Returns the certainty of packed units in the first entries of a record."""
        plan = self.mechanism.plan
        features = Features(images["mantissas"].astype(np.float64), images["scale"])
        logits = self._logits(head, features)
        records = certainty_records(
            logits, images["label"], shares, dim=self.dim, radius=2.0**plan.grid_bits
        )
        summed = np.zeros(self.dim, np.int64)
        summed[: records.shape[1]] = records.sum(0)
        norms = np.linalg.norm(records, axis=1) * (plan.l2_norm_clip / 2.0**plan.grid_bits)
        return summed, norms, np.full(len(norms), np.nan)

    def _logits(self, head: WholeWeights, features: Features) -> np.ndarray:
        flat = Features(features.mantissas.reshape(-1, self._rows), features.scales.ravel())
        return exact_logits(flat, head).reshape(*features.scales.shape, self._classes)

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
        logits = self._logits(head, features)
        logits = logits - logits.max(-1, keepdims=True)
        powers = np.exp(logits)
        sums = powers.sum(-1, keepdims=True)
        wanted = labels[..., None] == np.arange(self._classes)
        losses = np.log(sums[..., 0]) - (logits * wanted).sum(-1)
        return (wanted - powers / sums) * shares[..., None], (losses * shares).sum(1)


# Projection solved from one noised sum of feature covariances, on a frozen backbone.


_TOGETHER = 256
"""Units of one slab."""


class CovarianceFunction(TrainingRound):
    """Sums the covariance records of users in the only round, and solves for the projection.

    The record of the round is the noised mean record; the server state
    after it contains the projection.

    Args:
      projection: `keras.Model`, features to embedding, from `cut`: one square layer.
      mechanism: mechanism of kind covariance.

    Raises:
      ConfigError: the projection has another form.
    """

    def __init__(self, projection: Model, mechanism: Mechanism) -> None:
        variables = list(projection.trainable_variables)
        shapes = [tuple(variable.shape) for variable in variables]
        self.features = int(projection.input_shape[-1])
        if shapes != [(self.features, self.features)]:
            raise ConfigError(
                f"training.algorithm=dp_covariance solves for one layer of {self.features} x "
                f"{self.features} weights without a bias, as many as the backbone has features. "
                f"Set model.embedding_dim: {self.features}."
            )
        super().__init__(mechanism, covariance_size(self.features))
        self.variables = variables

    @override
    def slabs(self, units: Iterable[Unit], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round, some at a time; units without images contribute nothing."""
        filled = (unit for unit in cast("Iterable[UnitFeatures]", units) if len(unit))
        while taken := list(islice(filled, _TOGETHER)):
            yield Slab(taken)

    @override
    def _sums(self, weights: np.ndarray, slabs: Iterable[Slab]) -> RoundSums:
        grid_bits, total = self.mechanism.plan.grid_bits, np.zeros(self.dim, np.int64)
        rows: list[tuple[float, float, float, float]] = []
        for slab in slabs:
            for unit in cast("list[UnitFeatures]", slab):
                record, norm = covariance_record(
                    unit["features"], unit["label"], grid_bits=grid_bits
                )
                total += record
                rows.append((norm / COVARIANCE_NORM, math.nan, math.nan, float(len(unit))))
        return RoundSums(total, np.array(rows, np.float32).reshape(-1, 4))

    @override
    def advance(self, server: ServerConfig, state: ServerState, mean: np.ndarray) -> ServerState:
        """Solves the noised mean record for the projection."""
        plan = self.mechanism.plan
        noise = plan.noise_multiplier / plan.normalizer
        kernel = solve_whitening(
            mean / plan.l2_norm_clip,
            features=self.features,
            ridge=server.ridge * noise * math.sqrt(self.features),
        )
        return solved_state(server, kernel.ravel().astype(np.float32))
