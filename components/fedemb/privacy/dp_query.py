"""The mechanism as a DPQuery of tensorflow-privacy: the only TensorFlow in the privacy package.

tensorflow-privacy provides the protocol in which TensorFlow sums records; it never draws noise
(docs/privacy/noise.md#why-no-framework-draws-the-noise): its generators repeat themselves under
XLA, depend on `tf.random.set_seed`, or are seeded from the clock.
"""

# TensorFlow and tensorflow-privacy ship no types; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# The protocol's base class declares no return types, so pyright infers None for its stubs.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from dp_accounting import dp_event as dpe
from typing_extensions import override

from fedemb.errors import ConfigError
from fedemb.privacy.running import Mechanism

# Its __init__ imports TF-1 estimators that no longer exist; this is its own switch to skip them.
sys.skip_tf_privacy_import = True  # pyright: ignore[reportAttributeAccessIssue]
try:
    from tensorflow_privacy.privacy.dp_query import dp_query
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed. pip does not install it with fedemb, because it pins a "
        "dp-accounting that does not support these mechanisms. Run `pip install --no-deps "
        "tensorflow-privacy==0.9.0`, or install from the locks in requirements/."
    ) from error


class MechanismQuery(dp_query.SumAggregationDPQuery):
    """A mechanism in tensorflow-privacy's protocol: records in, the noised mean of a round out.

    The global state is the next round, int64 scalar; a record needs no parameters. Records may be
    accumulated in a `tf.function`; `get_noised_result` runs eagerly.
    """

    def __init__(self, mechanism: Mechanism):
        self._mechanism = mechanism

    @override
    def initial_global_state(self) -> tf.Tensor:
        """Returns round 0."""
        return tf.constant(0, tf.int64)

    @override
    def derive_sample_params(self, global_state: tf.Tensor) -> tuple[()]:
        """Returns no parameters: the clip is a number of the plan."""
        return ()

    @override
    def preprocess_record(self, params: tuple[()], record: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a virtual client's or unit's contribution; see `Mechanism.record`.

        Args:
          params: from `derive_sample_params`.
          record: update of every released variable, any float dtypes and shapes, `dim` in all.
        """
        return self._mechanism.record(record)

    @override
    def get_noised_result(
        self, sample_state: tf.Tensor, global_state: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, dpe.DpEvent]:
        """Returns the noised mean, float32 `[dim]`, the next round and the event of this one."""
        output = self._mechanism.aggregate(int(global_state), np.asarray(sample_state))
        return tf.constant(output.mean), global_state + 1, output.event
