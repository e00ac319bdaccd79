"""Local training of virtual clients, on any backend: objective, draws and augmentation."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, cast

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64, Num

from fedemb.config import AugmentationConfig, LocalTrainingConfig
from fedemb.models.keras_backend import (
    AnyTensor,
    Model,
    Part,
    Tensor,
    TfTensor,
    Variable,
    input_of,
    keras_ops,
)
from fedemb.training.rounds import ClientExamples, SlabRounds, seed_of

_ROTATION, _SCALE, _SHEAR, _SHIFT = math.pi / 18.0, 0.1, 0.15, 0.07
"""Largest rotation in radians, change of scale, shear, and shift as a share of the image size."""
DRAWS = 7
"""Random numbers in [-1, 1) per copy."""


def affine_transforms(
    config: AugmentationConfig, size: int, draws: Float32[Tensor, "draws count"]
) -> Float32[Tensor, "count 8"]:
    """Returns projective transforms about the image center, output pixel to input pixel.

    Args:
      config: whether to mirror.
      size: height and width of the images in pixels.
      draws: `[DRAWS, count]`, uniform in [-1, 1).

    Returns:
      float32 `[count, 8]`, as `ImageProjectiveTransformV3` takes them.
    """
    ops = keras_ops()
    angle = draws[0] * _ROTATION
    zoom_x = 1.0 + draws[1] * _SCALE
    zoom_y = 1.0 + draws[2] * _SCALE
    shear = draws[3] * _SHEAR
    shift_x, shift_y = draws[4] * _SHIFT * size, draws[5] * _SHIFT * size
    if config.flip:
        zoom_x *= ops.sign(draws[6])
    cos, sin, center = ops.cos(angle), ops.sin(angle), (size - 1) / 2.0
    a0, a1 = zoom_x * cos, zoom_y * (shear * cos - sin)
    b0, b1 = zoom_x * sin, zoom_y * (shear * sin + cos)
    a2 = center - a0 * center - a1 * center + shift_x
    b2 = center - b0 * center - b1 * center + shift_y
    zero = ops.zeros_like(a0)
    return ops.stack([a0, a1, a2, b0, b1, b2, zero, zero], axis=1)


def augment(
    images: Num[AnyTensor, "examples size size channels"],
    config: AugmentationConfig,
    uniform: Callable[[Sequence[int]], AnyTensor],
) -> Float32[AnyTensor, "examples size size channels"]:
    """Returns a random affine copy of every image.

    Augmentation is done inside the virtual client, before its update is clipped, so it costs no
    privacy (arXiv 2204.13650, section 3.2).

    Args:
      images: `[examples, size, size, channels]`, uint8 or float32; edges are repeated outwards.
      config: whether to mirror.
      uniform: shape to numbers in [-1, 1), float32.
    """
    ops = keras_ops()
    size = cast("int", images.shape[1])
    draws = uniform([DRAWS, ops.shape(images)[0]])
    # float32, because backends round interpolated integers differently.
    return ops.image.affine_transform(
        ops.cast(images, "float32"), affine_transforms(config, size, draws), fill_mode="nearest"
    )


def stateless_draws(seed: Int[TfTensor, "2"]) -> Callable[[Sequence[int]], TfTensor]:
    """Returns the draws of `augment` from a seed `[2]`, in a TensorFlow graph."""
    import tensorflow as tf

    return lambda shape: tf.random.stateless_uniform(shape, seed, minval=-1.0, maxval=1.0)


# Training objective of virtual clients, on any backend.


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


# Draws head, order and augmentation of a virtual client on the host, for every backend.
#
# All draws depend only on the seed of the client in the round. A run therefore has the same draws
# on each backend, and no framework's random generator is used.
#
# A head exists only inside one virtual client and one round. Its size is the number of distinct
# labels of that client, never the total number of identities. No artifact contains it.


class LocalData(NamedTuple, Generic[Part]):
    """Inputs of local training for one virtual client. Raw."""

    images: Part
    """uint8 `[examples, size, size, channels]`, at least one; or features, see `ClientExamples`."""
    rows: Part
    """int32 `[examples]`: row of the head for each example."""
    order: Part
    """int32 `[epochs * examples]`: indices of examples in training order."""
    draws: Part
    """float32 `[epochs * examples, copies, DRAWS]` in [-1, 1): draws of the augmentation."""
    head: Part
    """float32 `[classes, dim]`: initial local head, or zeros; no rows if the head is shared."""


def local_data(
    images: np.ndarray,
    labels: Int64[np.ndarray, " examples"],
    config: LocalTrainingConfig,
    *,
    seed: np.random.SeedSequence,
    dim: int,
    shared_head: bool = False,
) -> LocalData[np.ndarray]:
    """Numbers the labels of a client and draws its head, order and augmentation.

    Args:
      images: images of the client, or their features.
      labels: any values; row numbers for a shared head.
      config: epochs, cap, head, augmentation.
      seed: seed of the client in the round.
      dim: length of an embedding.
      shared_head: whether the head is shared, DP-FedAvg only.
    """
    # The cap applies per epoch, in the keyed order of the stored examples.
    images = images[: config.max_examples_per_client]
    labels = labels[: config.max_examples_per_client]
    order, head, augmentation = map(np.random.default_rng, seed.spawn(3))
    count = len(labels)
    rows, classes = (labels.astype(np.int32), 0) if shared_head else local_rows(labels)
    visits = np.argsort(order.random((config.epochs, count)), axis=1, kind="stable")
    return LocalData(
        images=images,
        rows=rows,
        order=visits.astype(np.int32).ravel(),
        draws=augmentation.uniform(
            -1.0, 1.0, (config.epochs * count, int(config.augmentation is not None), DRAWS)
        ).astype(np.float32),
        head=glorot_head(classes, dim, head)
        if config.head_init == "glorot"
        else np.zeros((classes, dim), np.float32),
    )


def no_data(config: LocalTrainingConfig, image: Sequence[int], dim: int) -> LocalData[np.ndarray]:
    """Returns the data of a client without examples, with the right shapes."""
    images, labels = np.zeros((0, *image), type_of(image)), np.zeros(0, np.int64)
    return local_data(images, labels, config, seed=np.random.SeedSequence(0), dim=dim)


def type_of(image: Sequence[int]) -> type[np.generic]:
    """Returns uint8 for pixels `[size, size, channels]`, float32 for features."""
    return np.uint8 if len(image) == 3 else np.float32


def local_rows(
    labels: Int64[np.ndarray, " examples"],
) -> tuple[Int32[np.ndarray, " examples"], int]:
    """Returns labels renumbered by first appearance, and the number of distinct labels."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int32)[inverse], len(first)


def glorot_head(
    classes: int, dim: int, random: np.random.Generator
) -> Float32[np.ndarray, "classes dim"]:
    """Returns a Glorot-uniform head, as in the paper."""
    limit = math.sqrt(6.0 / (classes + dim))
    return random.uniform(-limit, limit, (classes, dim)).astype(np.float32)


# Base class of rounds of virtual clients.


class ClientRounds(SlabRounds):
    """Base class of rounds of virtual clients that train locally, on any backend."""

    def _set_model(
        self,
        backbone: Model,
        config: LocalTrainingConfig,
        variables: Sequence[Variable] | None,
        shared_head_rows: int,
    ) -> list[tuple[int, ...]]:
        """Sets the trained model; returns the shapes of its trained tensors."""
        chosen = list(backbone.trainable_variables if variables is None else variables)
        self.objective = Objective(backbone, chosen, config, shared_head_rows)
        self._image = tuple(int(n) for n in backbone.input_shape[1:])
        return self.objective.shapes

    def initial_weights(self) -> Float32[np.ndarray, " dim"]:
        """Returns the values of the trained variables, float32 `[dim]`; a shared head is random."""
        parts = [v.numpy().ravel() for v in self.objective.variables]
        if self.objective.shared_head_rows:
            random = np.random.default_rng(np.random.SeedSequence([self.seed]))
            rows, dim = self._shapes[-1]
            parts.append(glorot_head(rows, dim, random).ravel())
        return np.concatenate(parts).astype(np.float32)

    def _data(self, client: ClientExamples, round_index: int) -> LocalData[np.ndarray]:
        return local_data(
            client.images,
            client.labels,
            self.objective.config,
            seed=seed_of(self.seed, round_index, client.grouping, client.group),
            dim=self.objective.dim,
            shared_head=bool(self.objective.shared_head_rows),
        )
