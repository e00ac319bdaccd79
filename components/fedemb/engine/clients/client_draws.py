"""Draws head, order and augmentation of a virtual client on the host, for every backend.

All draws depend only on the seed of the client in the round. A run therefore has the same draws on
each backend, and no framework's random generator is used.

A head exists only inside one virtual client and one round. Its size is the number of distinct
labels of that client, never the total number of identities. No artifact contains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from fedemb.config import LocalTrainingConfig
from fedemb.engine.clients.augmentation import DRAWS
from fedemb.models.arrays import Part


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
