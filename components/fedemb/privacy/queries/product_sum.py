"""Clipped sums of records that are products of two short vectors, without building the records.

The gradient of a linear head is `sum over images of features x error`: a matrix given by its two
factors. Both factors are rounded to integers of bounded size, so every product and every partial
sum is an integer below 2^53, and a float64 matrix product computes their sum exactly. An exact sum
is independent of order: the bits of a record depend only on the record, on any machine, and
removing a unit removes exactly its own integers from the sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedemb.errors import ConfigError

Doubles = npt.NDArray[np.float64]
_FEATURE_BITS = 15
_EXACT_BITS = 53
_CLIP_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding of clipped records cannot leave it."""


class Features(NamedTuple):
    """Features of images as integers, with a constant 1 appended for the bias. Raw."""

    mantissas: npt.NDArray[np.int16] | Doubles
    """`[..., features + 1]`: int16 in storage, float64 for products."""
    scales: Doubles
    """`[...]`, a power of two per image: features are mantissas / scale. NaN if a feature is not
    finite; the mantissas are zero there."""


def whole_features(features: npt.NDArray[np.float32]) -> Features:
    """Rounds features to 15 bits below the largest of each image.

    Args:
      features: float32 `[images, features]`.
    """
    finite = np.all(np.isfinite(features), axis=1)
    values = np.ones((len(features), features.shape[1] + 1))
    values[:, :-1] = np.where(finite[:, None], features, 0.0)
    top = np.abs(values).max(axis=1)
    scales = 2.0 ** np.floor(np.log2((2**_FEATURE_BITS - 1) / top))
    mantissas = np.rint(values * scales[:, None]).astype(np.int16)
    mantissas[~finite] = 0
    return Features(mantissas, np.where(finite, scales, np.nan))


class WholeWeights(NamedTuple):
    """Weights of a linear head as integers. Noised."""

    numbers: Doubles
    """`[features + 1, classes]`, the bias last; NaN if a weight was not finite."""
    grid: float
    """Weights are numbers / grid."""


def whole_weights(weights: npt.NDArray[np.float32]) -> WholeWeights:
    """Rounds weights to a grid on which their products with features sum exactly.

    Args:
      weights: float32 `[features + 1, classes]`.
    """
    bits = _EXACT_BITS - 1 - _FEATURE_BITS - math.ceil(math.log2(weights.shape[0]))
    largest = float(np.abs(weights).max(initial=0.0))
    if not np.isfinite(largest):
        return WholeWeights(np.full(weights.shape, math.nan), 1.0)
    grid = 2.0 ** math.floor(math.log2((2**bits - 1) / largest)) if largest else 1.0
    return WholeWeights(np.rint(weights.astype(np.float64) * grid), grid)


def exact_logits(features: Features, weights: WholeWeights) -> Doubles:
    """Returns logits of a linear head; the bits do not depend on an image's index in a batch.

    Args:
      features: features of `images` images, `[images, features + 1]`.
      weights: result of `whole_weights`.

    Returns:
      float64 `[images, classes]`.
    """
    whole = features.mantissas.astype(np.float64, copy=False)
    # The reverse product takes twice as long, as the number of classes is small.
    sums = (weights.numbers.T @ whole.T).T
    return sums / (features.scales[:, None] * weights.grid)


def most_units(images: int, grid_bits: int) -> int:
    """Returns the maximum number of units of so many images in one exact sum.

    Raises:
      ConfigError: not even one unit fits.
    """
    most = 2 ** max(0, _EXACT_BITS - 1 - grid_bits) // (images * images)
    if not most:
        raise ConfigError(
            f"a unit of {images} images is too large for an exact sum on a grid of {grid_bits} "
            "bits; lower training.unit_gradient.images_per_unit"
        )
    return most


def clipped_product_sum(
    features: Features,
    errors: Doubles,
    *,
    l2_norm_clip: float,
    grid_bits: int,
) -> tuple[npt.NDArray[np.int64], Doubles]:
    """Sums `sum over images of features x error` of units, each clipped, on the mechanism's grid.

    Formal guarantee: the integer matrix of any unit has norm at most 2^grid_bits; a unit with a
    feature or an error that is not finite contributes zero.

    Args:
      features: `[units, images, features + 1]`.
      errors: float64 `[units, images, classes]`, zero for images a unit does not have.
      l2_norm_clip: the clip.
      grid_bits: grid bits of the mechanism's plan.

    Returns:
      int64 `[(features + 1) * classes]`, and the norms before the clip, float64 `[units]`.

    Raises:
      ValueError: more than `most_units` at once.
    """
    units, images, rows = features.mantissas.shape
    classes = errors.shape[-1]
    if units > most_units(images, grid_bits):
        raise ValueError(
            f"{units} units of {images} images exceed the capacity of one exact sum "
            f"({most_units(images, grid_bits)} units); use smaller batches"
        )
    whole = features.mantissas.astype(np.float64, copy=False)
    real = errors / features.scales[..., None]  # so that `whole x real` is the record
    finite = np.all(np.isfinite(real), axis=(1, 2), keepdims=True)
    real = np.where(finite, real, 0.0)
    lengths = np.sqrt(np.einsum("uif,uif->ui", whole, whole))  # the sums are exact
    norms = apart = (lengths * np.sqrt(np.square(real).sum(-1))).sum(1) / images
    if images > 1:
        # |sum of x e'|^2 = sum over pairs of (x . x')(e . e'); the first factor is exact. Images #
        # may cancel in the record and not in its parts, which must also stay integers below 2^53.
        pairs = (whole @ whole.transpose(0, 2, 1)) * (real @ real.transpose(0, 2, 1))
        norms = np.sqrt(np.maximum(pairs.sum(axis=(1, 2)), 0.0))
    largest = np.maximum(norms, apart) * (1.0 + _CLIP_SLACK)
    # Truncating the errors of several images may increase the norm of their sum by this much.
    slack = lengths.sum(1) * math.sqrt(classes) if images > 1 else np.zeros(units)
    target = np.maximum(2.0**grid_bits - slack, 0.0)
    held = np.maximum(l2_norm_clip, largest)
    truncated = np.trunc(real * (target / held)[:, None, None])
    summed = truncated.reshape(-1, classes).T @ whole.reshape(-1, rows)
    return summed.T.astype(np.int64, order="C").ravel(), norms
