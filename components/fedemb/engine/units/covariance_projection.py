"""Projection solved from one noised sum of feature covariances, on a frozen backbone."""

# Keras is not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np

from fedemb.config import ServerConfig
from fedemb.engine.feature_cache import UnitFeatures
from fedemb.engine.rounds import RoundSums, Slab
from fedemb.engine.server import ServerRule, ServerState
from fedemb.errors import ConfigError
from fedemb.models.arrays import Model
from fedemb.privacy.queries import Mechanism, Parameters
from fedemb.privacy.queries.covariance_sum import (
    covariance_record,
    covariance_size,
    solve_whitening,
)

_TOGETHER = 256
"""Units of one slab."""


class CovariancePlan(Protocol):
    """Fields of a plan that the solver reads."""

    @property
    def l2_norm_clip(self) -> float:
        """Clipping norm."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """Noise / clipping norm."""
        ...

    @property
    def normalizer(self) -> float:
        """Public divisor of the sum."""
        ...

    @property
    def grid_bits(self) -> int:
        """Bits of the grid of the sum."""
        ...

    @property
    def feature_norm(self) -> float:
        """Longest feature vector; longer ones are shortened."""
        ...

    @property
    def covariance_norm(self) -> float:
        """Largest norm of a covariance; larger ones are scaled down."""
        ...

    @property
    def mean_weight(self) -> float:
        """Weight of the mean beside the covariance."""
        ...


class CovarianceFunction:
    """Sums the covariance records of users in the only round, and solves for the projection.

    Implements `TrainingRound`. The record of the round is the noised mean record; the server state
    after it contains the projection.

    Args:
      projection: `keras.Model`, features to embedding, from `cut`: one square layer with a bias.
      mechanism: mechanism of kind covariance.

    Raises:
      ConfigError: the projection has another form.
    """

    def __init__(self, projection: Model, mechanism: Mechanism) -> None:
        variables = list(projection.trainable_variables)
        shapes = [tuple(variable.shape) for variable in variables]
        self.features = int(projection.input_shape[-1])
        if shapes != [(self.features, self.features), (self.features,)]:
            raise ConfigError(
                f"training.algorithm=dp_covariance solves for one layer of {self.features} x "
                f"{self.features} weights with a bias, as many as the backbone has features. Set "
                f"model.embedding_dim: {self.features} and projection_bias: true."
            )
        self.mechanism, self.variables = mechanism, variables
        self._plan = cast("CovariancePlan", mechanism.plan)
        self.dim = covariance_size(self.features)
        self.seconds_waited = 0.0

    def initial_weights(self) -> np.ndarray:
        """Returns kernel, then bias, float32 `[features * (features + 1)]`."""
        return np.concatenate([v.numpy().ravel() for v in self.variables]).astype(np.float32)

    def slabs(self, units: Iterable[UnitFeatures], round_index: int) -> Iterator[Slab]:
        """Packs the units of a round, some at a time; units without images contribute nothing."""
        del round_index  # nothing here is random
        waiting: list[UnitFeatures] = []
        for unit in units:
            if not len(unit):
                continue
            waiting.append(unit)
            if len(waiting) == _TOGETHER:
                yield Slab(waiting)
                waiting = []
        if waiting:
            yield Slab(waiting)

    def __call__(
        self, weights: np.ndarray, units: Iterable[UnitFeatures], round_index: int
    ) -> RoundSums:
        """Returns the clipped sum of the round; `weights` has no effect."""
        parameters = self.mechanism.clip
        return self.run(weights, self.slabs(units, round_index), parameters)

    def run(self, weights: np.ndarray, slabs: Iterable[Slab], parameters: Parameters) -> RoundSums:
        """Returns the clipped sum of the round from packed units; see `TrainingRound.run`."""
        del weights, parameters  # records depend on features only, and the clip is constant
        plan, total = self._plan, np.zeros(self.dim, np.int64)
        rows: list[tuple[float, float, float, float]] = []
        self.seconds_waited, asked = 0.0, time.perf_counter()
        for slab in slabs:
            self.seconds_waited += time.perf_counter() - asked
            for unit in cast("list[UnitFeatures]", slab):
                record, norm = covariance_record(
                    unit["features"],
                    unit["label"],
                    grid_bits=plan.grid_bits,
                    feature_norm=plan.feature_norm,
                    covariance_norm=plan.covariance_norm,
                    mean_weight=plan.mean_weight,
                )
                total += record
                rows.append((norm / plan.covariance_norm, math.nan, math.nan, float(len(unit))))
            asked = time.perf_counter()
        return RoundSums((total,), np.array(rows, np.float32).reshape(-1, 4))

    @property
    def advance(self) -> ServerRule:
        """Server step that solves the noised mean record for the projection."""
        return SolvedProjection(self._plan, self.features)


@dataclass(frozen=True)
class SolvedProjection:
    """Solves a noised mean record for a projection; see `ServerRule`."""

    plan: CovariancePlan
    features: int

    def __call__(self, server: ServerConfig, state: ServerState, mean: np.ndarray) -> ServerState:
        """See `ServerRule`."""
        plan = self.plan
        noise = plan.noise_multiplier / plan.normalizer
        kernel, bias = solve_whitening(
            mean / plan.l2_norm_clip,
            features=self.features,
            feature_norm=plan.feature_norm,
            mean_weight=plan.mean_weight,
            ridge=server.ridge * noise * math.sqrt(self.features),
        )
        weights = np.concatenate([kernel.ravel(), bias]).astype(np.float32)
        share = np.float32(1.0) - np.float32(server.ema_decay)  # average of one round
        return replace(state, weights=weights, average=share * weights, rounds=state.rounds + 1)
