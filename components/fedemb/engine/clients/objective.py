"""Training objective of virtual clients, on any backend."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedemb.config import LocalTrainingConfig
from fedemb.models.arrays import AnyTensor, Model, Tensor, Variable
from fedemb.models.keras_backend import keras_ops
from fedemb.models.preprocessing import input_of

PROTOTYPE_BATCH = 128
"""Minimum number of images embedded at once for a prototype head."""


@dataclass(frozen=True)
class Objective:
    """A backbone, its trained variables, and the local training configuration."""

    backbone: Model
    """Backbone; weights outside `variables` are frozen."""
    variables: Sequence[Variable]
    """Trained variables, in the order of the update."""
    config: LocalTrainingConfig
    shared_head_rows: int = 0
    """DP-FedAvg: rows of the head that is broadcast and trained with the backbone; 0: a new local
    head for every client."""
    fixed: Mapping[int, Tensor] | None = None
    """Values of the frozen weights by `id` of their variable; None: read when used."""

    def on_this_device(self) -> Objective:
        """Returns the objective with frozen weights read once, before any loop."""
        ops = keras_ops()
        trained = {id(v) for v in self.variables}
        rest = (v for v in self.backbone.variables if id(v) not in trained)
        return replace(self, fixed={id(v): ops.copy(v.value) for v in rest})

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return int(self.backbone.output_shape[-1])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors of an update."""
        shapes = [tuple(int(n) for n in v.shape) for v in self.variables]
        return [*shapes, (self.shared_head_rows, self.dim)] if self.shared_head_rows else shapes

    def embeddings(self, weights: Sequence[AnyTensor], images: AnyTensor) -> AnyTensor:
        """Returns embeddings of examples with `weights` instead of `variables`, float32."""
        given = dict(self.fixed or {})
        given.update((id(v), w) for v, w in zip(self.variables, weights, strict=True))

        def value(variable: Variable) -> Tensor:
            found = given.get(id(variable))
            return variable.value if found is None else found

        trainable = [value(v) for v in self.backbone.trainable_variables]
        state = [value(v) for v in self.backbone.non_trainable_variables]
        inputs = input_of(self.backbone, images)
        outputs, _ = self.backbone.stateless_call(trainable, state, inputs, training=True)
        return keras_ops().cast(outputs, "float32")
