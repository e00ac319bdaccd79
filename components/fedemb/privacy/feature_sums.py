"""Exact sums of clipped records that are made of features of a frozen backbone."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedemb.errors import ConfigError
from fedemb.foundation.cores import use_one_blas_thread
from fedemb.privacy.section import MOST_IMAGES

Doubles = npt.NDArray[np.float64]
CONSTANT = 0.25
"""Value of the bias feature. Beside features of length 1, it adds 3 % to the norm of a record; 1
would add 41 %. A power of two, so that products stay exact."""
_FEATURE_BITS = 15
_EXACT_BITS = 53
_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding of clipped records cannot leave it."""


class Features(NamedTuple):
    """Features of images as integers, with `CONSTANT` appended for the bias. Raw."""

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
    values = np.full((len(features), features.shape[1] + 1), CONSTANT)
    values[:, :-1] = np.where(finite[:, None], features, 0.0)
    top = np.abs(values).max(axis=1)
    scales = 2.0 ** np.floor(np.log2((2**_FEATURE_BITS - 1) / top))
    mantissas = np.rint(values * scales[:, None]).astype(np.int16)
    mantissas[~finite] = 0
    return Features(mantissas, np.where(finite, scales, np.nan))


class WholeWeights(NamedTuple):
    """Weights of a linear head as integers. Noised."""

    numbers: Doubles
    """`[features + 1, classes]`, last bias / `CONSTANT`; NaN if a weight was not finite."""
    grid: float
    """Weights are numbers / grid."""


def whole_weights(weights: npt.NDArray[np.float32]) -> WholeWeights:
    """Rounds weights to a grid on which their products with features sum exactly.

    Args:
      weights: float32 `[features + 1, classes]`, kernel and bias.
    """
    bits = _EXACT_BITS - 1 - _FEATURE_BITS - math.ceil(math.log2(weights.shape[0]))
    exact = np.concatenate([weights[:-1], weights[-1:] / CONSTANT]).astype(np.float64)
    largest = float(np.abs(exact).max(initial=0.0))
    if not np.isfinite(largest):
        return WholeWeights(np.full(weights.shape, math.nan), 1.0)
    grid = 2.0 ** math.floor(math.log2((2**bits - 1) / largest)) if largest else 1.0
    return WholeWeights(np.rint(exact * grid), grid)


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
    features: Features, errors: Doubles, *, l2_norm_clip: float, grid_bits: int
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
    largest = np.maximum(norms, apart) * (1.0 + _SLACK)
    # Truncating the errors of several images may increase the norm of their sum by this much.
    slack = lengths.sum(1) * math.sqrt(classes) if images > 1 else np.zeros(units)
    target = np.maximum(2.0**grid_bits - slack, 0.0)
    held = np.maximum(l2_norm_clip, largest)
    truncated = np.trunc(real * (target / held)[:, None, None])
    summed = truncated.reshape(-1, classes).T @ whole.reshape(-1, rows)
    return summed.T.astype(np.int64, order="C").ravel(), norms


# Certainty of a classifier, the private statistic of the round that sets its temperature.


def temperatures(dim: int) -> Doubles:
    """Returns the temperatures that a record of `dim` entries measures."""
    return np.geomspace(1 / 16, 16, min(17, dim))


def certainty_records(
    logits: Doubles, labels: npt.NDArray[np.int64], shares: Doubles, *, dim: int, radius: float
) -> npt.NDArray[np.int64]:
    """Returns by how much units are too certain at each temperature, as integers.

    The value of an image is its largest probability, minus 1 if that class is right; the mean over
    units is zero where the mean probability is the accuracy. Formal guarantee: the integer vector
    of any unit has norm at most `radius`; a unit with a value that is not finite contributes zero.

    Args:
      logits: float64 `[units, images, classes]`.
      labels: `[units, images]`.
      shares: weights of images in the mean of their unit, `[units, images]`.
      dim: entries of a record.
      radius: norm of the longest record.

    Returns:
      int64 `[units, temperatures(dim)]`.
    """
    divisors = temperatures(dim)
    scaled = logits[..., None, :] / divisors[:, None]
    largest = 1.0 / np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1)
    right = (logits.argmax(-1) == labels)[..., None]
    excess = ((largest - right) * shares[..., None]).sum(1)
    kept = np.where(np.all(np.isfinite(excess), axis=1, keepdims=True), excess, 0.0)
    step = radius * (1.0 - _SLACK) / math.sqrt(len(divisors))
    return np.trunc(np.clip(kept, -1.0, 1.0) * step).astype(np.int64)


def solve_temperature(mean: npt.NDArray[np.floating]) -> float:
    """Returns the divisor of logits at which the noised mean certainty is the accuracy.

    This is post-processing. Certainty falls with the temperature, so the noised values are first
    replaced by the nearest falling ones (isotonic regression).
    """
    divisors = temperatures(len(mean))
    count = len(divisors)
    noised = mean[:count].astype(np.float64)
    means = np.full((count, count), -np.inf)  # of values from row to column
    for first in range(count):
        means[first, first:] = np.cumsum(noised[first:]) / np.arange(1, count - first + 1)
    falling = np.array([means[: at + 1, at:].max(1).min() for at in range(count)])
    return float(np.exp(np.interp(0.0, -falling, np.log(divisors))))


# Exact sums of clipped feature covariances, the private statistics of a whitening projection.
#
# Within-class covariance normalisation (Hatch, Kajarekar and Stolcke, Interspeech 2006) divides
# features by their covariance within a class. Here the classes are users, or the labels of a
# user. The noised covariance is the mechanism of Dwork et al. (STOC 2014, Analyze Gauss): one
# Gaussian on the upper triangle.
#
# The record of a user is clipped before the sum. Sums of integers do not depend on order, so
# removing a user removes exactly their own integers.


SHRINKAGE = 0.5
"""Share of the mean eigenvalue that is added to each eigenvalue of the covariance."""
COVARIANCE_NORM = 0.05
"""Frobenius norm that larger covariances of a user are clipped to."""
MEAN_WEIGHT = 0.7
"""Norm of the record part with the mean, relative to the part with the covariance."""
_COVARIANCE_BITS = 20
_LARGEST = 1e100
"""Limit above which features count as not finite, because their squares could overflow."""
_TINY = 1e-12


def covariance_size(features: int) -> int:
    """Returns the entries of a record: a mean and the upper triangle of a covariance."""
    return features + features * (features + 1) // 2


@cache
def _triangle(features: int) -> tuple[npt.NDArray[np.intp], Doubles]:
    """Returns flat indices of the upper triangle, and weights that preserve the Frobenius norm."""
    rows, columns = np.triu_indices(features)
    return rows * features + columns, np.where(rows == columns, 1.0, math.sqrt(2.0))


def covariance_record(
    features: npt.NDArray[np.floating], labels: npt.NDArray[np.int64], *, grid_bits: int
) -> tuple[npt.NDArray[np.int64], float]:
    """Returns the record of one user, `(MEAN_WEIGHT x mean, covariance)`, clipped.

    Each feature vector is first clipped to norm 1. The covariance is that of images around the
    mean of their label, and is clipped to `COVARIANCE_NORM` and divided by it. The parts have
    norms of at most `MEAN_WEIGHT` and 1, and together at most the clip.
    Formal guarantee: the integer vector has norm at most 2^grid_bits. A user without images, or
    with a feature that is not finite, has a record of zeros.

    Args:
      features: `[images, features]`.
      labels: `[images]`.
      grid_bits: grid bits of the plan: a record of the clip's length is 2^grid_bits long.

    Returns:
      int64 `[covariance_size(features)]`, and the norm of the covariance before the clip.

    Raises:
      ConfigError: too many images for an exact sum.
    """
    images, dim = features.shape
    if images > MOST_IMAGES:
        raise ConfigError(
            f"A user with {images} images has more than the {MOST_IMAGES} of an exact sum. Lower "
            "partition.max_images_per_user"
        )
    exact = features.astype(np.float64)
    if not images or not np.all(np.abs(exact) < _LARGEST):
        return np.zeros(covariance_size(dim), np.int64), 0.0
    length = np.sqrt(np.square(exact).sum(1, keepdims=True))
    whole = np.trunc(exact / np.maximum(1.0, length) * 2.0**_COVARIANCE_BITS)
    within = whole.T @ whole / images
    for label in np.unique(labels):
        summed = whole[labels == label].sum(0)
        within -= np.outer(summed, summed) / (int((labels == label).sum()) * images)
    entries, weights = _triangle(dim)
    covariance = within.ravel()[entries] * weights * 2.0 ** (-2 * _COVARIANCE_BITS)
    norm = float(np.sqrt(np.square(covariance).sum()))
    mean = whole.sum(0) / (images * 2.0**_COVARIANCE_BITS)
    record = np.concatenate([MEAN_WEIGHT * mean, covariance / max(COVARIANCE_NORM, norm)])
    radius = 2.0**grid_bits / math.hypot(1.0, MEAN_WEIGHT) * (1.0 - _SLACK)
    return np.trunc(record * radius).astype(np.int64), norm


def solve_whitening(mean: npt.NDArray[np.floating], *, features: int, ridge: float) -> Doubles:
    """Computes the projection from a noised mean record; this is post-processing.

    The direction of the mean is removed. Subtracting the mean would do as much for photos of these
    users, and would move photos of other kinds by something that is not theirs. Noise may make
    eigenvalues of the covariance negative; they are set to at least zero.

    Args:
      mean: noised mean record in units of the clip, `[covariance_size(features)]`.
      features: number of features.
      ridge: value added to each eigenvalue, in units of the clip.

    Returns:
      Kernel `[features, features]`: features without the direction of their mean, divided by the
      square root of the covariance. The largest gain is 1.
    """
    use_one_blas_thread()
    exact = mean.astype(np.float64) * math.hypot(1.0, MEAN_WEIGHT)
    entries, weights = _triangle(features)
    covariance = np.zeros(features * features)
    covariance[entries] = exact[features:] / weights
    covariance = covariance.reshape(features, features)
    covariance = covariance + np.triu(covariance, 1).T
    values, vectors = np.linalg.eigh(covariance)
    level = SHRINKAGE * max(float(np.trace(covariance)), 0.0) / features
    level += ridge * math.hypot(1.0, MEAN_WEIGHT)
    values = np.maximum(values, 0.0) + max(level, _TINY)
    kernel = (vectors * np.sqrt(values.min() / values)) @ vectors.T
    direction = exact[:features] / max(float(np.linalg.norm(exact[:features])), _TINY)
    return kernel - np.outer(direction, direction @ kernel)
