"""Tree noise for DP-FTRL: tensorflow-privacy's tree, our numbers, exact integers."""

# TensorFlow and tensorflow-privacy ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import override

# Its __init__ imports TF-1 estimators that no longer exist; this is its own switch against that.
sys.skip_tf_privacy_import = True  # pyright: ignore[reportAttributeAccessIssue]
from tensorflow_privacy.privacy.dp_query import (  # noqa: E402
    restart_query,
    tree_aggregation,
    tree_aggregation_query,
)

from fedemb.errors import PlanMismatch  # noqa: E402
from fedemb.keys import derive  # noqa: E402
from fedemb.privacy.mechanisms.keyed_noise import CorrelatedStream, grid_scale  # noqa: E402
from fedemb.privacy.mechanisms.mechanism import MechanismPlan  # noqa: E402
from fedemb.privacy.mechanisms.noise import Integers, add_rounded_noise  # noqa: E402


class TreeStream(CorrelatedStream):
    """Tree noise by tensorflow-privacy's `TreeResidualSumQuery`, exact on the integer grid.

    Its aggregator computes in float32, which would leave the low bits of the sum unnoised. So each
    node's integer noise travels as three limbs of 20 bits, whose sums over at most 15 nodes
    float32 holds exactly; that rules out its `use_efficient` variant, which divides.

    The library draws the nodes of the next leaf while it answers for this one. We make it draw them
    in the round they are used in, under that round's key: each round first moves the tree on
    (`_advance`), then reads it and drops the successor.
    """

    LIMB_BITS, LIMBS, MAX_LEAVES = 20, 3, 2**15

    def __init__(self, plan: MechanismPlan, size: int):
        leaves = plan.restart_every or plan.rounds
        if leaves > self.MAX_LEAVES:
            raise PlanMismatch(
                f"a tree of {leaves} leaves exceeds the {self.MAX_LEAVES} that sum exactly; set "
                "restart_every"
            )
        spec = tf.TensorSpec([self.LIMBS, size], tf.float32)
        self._nodes = _NodeNoise(spec, grid_scale(plan))
        tree = tree_aggregation_query.TreeResidualSumQuery(
            record_specs=spec,
            noise_generator=self._nodes,
            clip_fn=lambda record, _: record,
            clip_value=1.0,
            use_efficient=False,
        )
        indicator = restart_query.PeriodicRoundRestartIndicator(leaves)
        self._query = restart_query.RestartQuery(tree, indicator)
        self._zero = tf.zeros(spec.shape, spec.dtype)
        self._state: Any = None

    @override
    def next(self, key: bytes) -> Integers:
        self._nodes.key = key
        if self._state is None:
            self._state = self._query.initial_global_state()
        else:
            _, self._state, _ = self._query.get_noised_result(self._zero, self._state)
        self._nodes.key = None
        residual, _, _ = self._query.get_noised_result(self._zero, self._state)
        limbs = residual.numpy().astype(np.int64)
        return cast("Integers", sum(limbs[i] << (self.LIMB_BITS * i) for i in range(self.LIMBS)))


class _NodeNoise(tree_aggregation.ValueGenerator):
    """Noise of tree nodes from the current round's key; zeros while there is none."""

    def __init__(self, spec: tf.TensorSpec, scale: float):
        self._spec, self._scale = spec, scale
        self.key: bytes | None = None

    @override
    def initialize(self) -> tf.Tensor:
        return tf.constant(0, tf.int64)

    @override
    def next(self, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        value = tf.numpy_function(self._draw, [state], tf.float32)
        return tf.ensure_shape(value, self._spec.shape), state + 1

    def _draw(self, node: np.int64) -> npt.NDArray[np.float32]:
        limbs, size = cast("list[int]", self._spec.shape.as_list())
        out = np.zeros((limbs, size), dtype=np.float32)
        if self.key is not None:
            zeros = np.zeros(size, dtype=np.int64)
            left = add_rounded_noise(zeros, derive(self.key, "node", str(node)), self._scale)
            for limb in range(limbs - 1):
                out[limb] = left & ((1 << TreeStream.LIMB_BITS) - 1)
                left >>= TreeStream.LIMB_BITS
            out[limbs - 1] = left
        return out
