"""Head solved from one noised sum of second moments, on features of a frozen backbone."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
from typing_extensions import override

from fedemb.config import ServerConfig, UnitGradientConfig
from fedemb.engine.server import ServerRule, ServerState
from fedemb.engine.units.head_gradient import HeadGradientFunction, SlabSum
from fedemb.models.arrays import Model
from fedemb.privacy.queries import Mechanism
from fedemb.privacy.queries.moment_sum import moment_size, moment_sum, solve_moments

SHARPNESS = 12.0
"""Logits are least-squares scores times this number. Scores are near probabilities, from 0 to 1, so
their softmax would be almost uniform. Measured in studies/photos."""


class MomentPlan(Protocol):
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
    def normalizer(self) -> int:
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
    def label_weight(self) -> float:
        """Weight of a label beside the features."""
        ...


class LeastSquaresFunction(HeadGradientFunction):
    """Sums the second moments of units in the only round, and solves for the head.

    The record of the round is the noised mean moment; the server state after it contains the head.

    Args:
      classifier: `keras.Model` from `build_classifier`; not changed by rounds.
      mechanism: mechanism of kind least_squares.
      config: images of a unit.
    """

    def __init__(self, classifier: Model, mechanism: Mechanism, config: UnitGradientConfig) -> None:
        super().__init__(classifier, mechanism, config)
        self._plan = cast("MomentPlan", mechanism.plan)
        self.dim = moment_size(self._rows - 1, self._classes)

    @override
    def _sum_at(self, weights: np.ndarray) -> Callable[[np.ndarray, np.ndarray], SlabSum]:
        """Returns the sum of moments, which do not depend on the weights."""
        return self._moments

    def _moments(self, images: np.ndarray, shares: np.ndarray) -> SlabSum:
        """Returns the moments of packed units, with their largest feature norms."""
        plan = self._plan
        features = images["mantissas"][..., :-1] / images["scale"][..., None]
        summed = moment_sum(
            features,
            np.where(shares > 0, images["label"], -1),
            classes=self._classes,
            grid_bits=plan.grid_bits,
            feature_norm=plan.feature_norm,
            label_weight=plan.label_weight,
        )
        lengths = np.sqrt(np.square(features).sum(-1)).max(1)
        return summed, lengths, np.full(len(lengths), np.nan)

    @property
    def advance(self) -> ServerRule:
        """Server step that solves the noised mean moments for the head."""
        return SolvedHead(self._plan, self._rows, self._classes)


@dataclass(frozen=True)
class SolvedHead:
    """Solves noised mean moments for a head; see `ServerRule`."""

    plan: MomentPlan
    rows: int
    """Number of features, plus 1 for the bias."""
    classes: int

    def __call__(self, server: ServerConfig, state: ServerState, mean: np.ndarray) -> ServerState:
        """See `ServerRule`."""
        plan = self.plan
        noise = plan.noise_multiplier * plan.l2_norm_clip / plan.normalizer
        kernel, bias = solve_moments(
            mean / plan.l2_norm_clip,
            classes=self.classes,
            ridge=server.ridge * noise / plan.l2_norm_clip * math.sqrt(self.rows),
            label_weight=plan.label_weight,
        )
        head = SHARPNESS * np.concatenate([(kernel / plan.feature_norm).ravel(), bias])
        head = head.astype(np.float32)
        share = np.float32(1.0) - np.float32(server.ema_decay)  # average of one round
        return replace(state, weights=head, average=share * head, rounds=state.rounds + 1)
