"""DP-SGD rounds on JAX, with the records of `UnitGradientFunction`.

Units of a micro-batch are vectorized by `vmap`.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from typing_extensions import override

from fedemb.config import UnitGradientConfig
from fedemb.engine.jax.rounds import JaxRounds
from fedemb.engine.units.unit_gradient import SLAB_MICROBATCHES, UnitRounds, UnitShare
from fedemb.models.arrays import JaxArray, JaxDevice, Model, Variable
from fedemb.privacy.queries import Mechanism, Parameters


class JaxUnitGradientFunction(UnitRounds, JaxRounds[UnitShare[np.ndarray], UnitShare[JaxArray]]):
    """Sums the clipped mean gradients of the units of a round, on JAX.

    Args:
      classifier: `keras.Model` of `build_classifier`; not changed by rounds.
      mechanism: clips and rounds each record.
      config: micro-batches, views.
      variables: variables that train.
      seed: seed of the views; never of noise or sampling.
      devices: devices, with a separate micro-batch each. None uses all devices.
    """

    def __init__(
        self,
        classifier: Model,
        mechanism: Mechanism,
        config: UnitGradientConfig,
        *,
        variables: Sequence[Variable],
        seed: int = 0,
        devices: Sequence[JaxDevice] | None = None,
    ) -> None:
        super().__init__(
            self._set_model(classifier, config, variables),
            mechanism,
            together=config.microbatch,
            steps=SLAB_MICROBATCHES,
            smaller="training.unit_gradient.microbatch, views or images_per_unit",
            seed=seed,
            devices=devices,
        )

    @override
    def _records(
        self, broadcast: list[JaxArray], units: UnitShare[JaxArray], clip: Parameters
    ) -> tuple[JaxArray, JaxArray]:
        import jax
        import jax.numpy as jnp

        record = jax.vmap(partial(self._record, broadcast))
        updates, losses = record(self._views(units), units.labels, units.weights)
        norms = jnp.sqrt(jnp.sum(jnp.square(updates.astype("float64")), axis=1))
        images = jnp.count_nonzero(units.weights, axis=1)
        return updates, jnp.stack([norms, losses, losses, images], axis=1).astype("float32")

    def _record(
        self, broadcast: list[JaxArray], images: JaxArray, labels: JaxArray, weights: JaxArray
    ) -> tuple[JaxArray, JaxArray]:
        """Returns the negative mean gradient of a unit, float32 `[dim]`, and its loss."""
        import jax
        import jax.numpy as jnp

        views = self._config.views
        labels = jnp.repeat(labels, views)
        weights = jnp.repeat(weights / float(views), views)

        def loss(trained: list[JaxArray]) -> JaxArray:
            chances = jax.nn.log_softmax(self._logits(trained, images))
            return -jnp.sum(weights * jnp.take_along_axis(chances, labels[:, None], 1)[:, 0])

        value, gradients = jax.value_and_grad(loss)(broadcast)
        return jnp.concatenate([-jnp.ravel(part) for part in gradients]), value
