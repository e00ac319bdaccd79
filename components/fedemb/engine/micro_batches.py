"""Features of a frozen backbone in micro-batches, with the same bits for an image anywhere."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float32, UInt8

from fedemb.engine.threads import available_cores
from fedemb.foundation import step_logging as events
from fedemb.models.arrays import Model
from fedemb.models.keras_backend import traced

_LOG = logging.getLogger(__name__)

SIZE = 16
"""Images of a micro-batch. Always full: the last one is padded with black images."""


class MicroBatches:
    """Computes features of images; no feature depends on the other images or on the position.

    A probe with random images compares bits for several neighbours and positions before the first
    private image is read. If they differ, features are computed one image at a time, and the log
    says so.

    Args:
      trunk: `keras.Model`, frozen, images to features.
    """

    def __init__(self, trunk: Model) -> None:
        from fedemb.models.preprocessing import preprocess

        self.dim = int(trunk.output_shape[-1])
        self._compute = traced(lambda images: trunk(preprocess(images), training=False))
        self.size = SIZE
        """Images computed together: `SIZE`, or 1 if the probe failed."""
        if not same_bits_anywhere(self._together, tuple(trunk.input_shape[1:])):
            _LOG.warning(events.ONE_BY_ONE)
            self.size = 1
        self._threads = ThreadPoolExecutor(available_cores(), thread_name_prefix="features")

    def __call__(
        self, images: UInt8[np.ndarray, "images size size channels"]
    ) -> Float32[np.ndarray, "images features"]:
        """Returns the features of images."""
        found = np.zeros((len(images), self.dim), np.float32)
        starts = range(0, len(images), self.size)
        batches = self._threads.map(self._together, (images[s : s + self.size] for s in starts))
        for start, batch in zip(starts, batches, strict=True):
            found[start : start + self.size] = batch
        return found

    def _together(self, images: np.ndarray) -> np.ndarray:
        """Returns the features of at most `size` images, computed as one full micro-batch."""
        full = np.zeros((self.size, *images.shape[1:]), np.uint8)
        full[: len(images)] = images
        found: np.ndarray = np.asarray(self._compute(full))
        return found[: len(images)]


def same_bits_anywhere(
    compute: Callable[[np.ndarray], np.ndarray], shape: Sequence[int], size: int = SIZE
) -> bool:
    """Returns whether the features of random images have the same bits in any position.

    Args:
      compute: uint8 `[at most size, *shape]` to features.
      shape: height, width and channels of an image.
      size: images of a micro-batch.
    """
    images = np.random.default_rng(0).integers(0, 256, (2 * size, *shape), np.uint8)
    first = np.concatenate([compute(images[:size]), compute(images[size:])])
    for order in _orders(size):
        again = np.concatenate([compute(images[order[at : at + size]]) for at in (0, size)])
        if (again != first[order]).any():
            return False
    return all((compute(images[at : at + 1])[0] == first[at]).all() for at in (0, size - 1))


def _orders(size: int) -> Iterator[np.ndarray]:
    """Orders of two micro-batches: each image has other neighbours and other positions."""
    random = np.random.default_rng(1)
    yield np.arange(2 * size)  # the same order again: bits do not depend on timing
    yield np.roll(np.arange(2 * size), 1)
    yield np.arange(2 * size)[::-1]
    yield random.permutation(2 * size)
