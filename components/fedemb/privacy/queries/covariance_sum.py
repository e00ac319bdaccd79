"""Exact sums of clipped feature covariances, the private statistics of a whitening projection.

Within-class covariance normalisation (Hatch, Kajarekar and Stolcke, Interspeech 2006) divides
features by their covariance within a class. Here the classes are users, or the labels of a user.
The noised covariance is the mechanism of Dwork et al. (STOC 2014, Analyze Gauss): one Gaussian on
the upper triangle.

The record of a user is clipped before the sum. Sums of integers do not depend on order, so removing
a user removes exactly their own integers.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from fedemb.errors import ConfigError
from fedemb.privacy.randomness.grid import MOST_IMAGES

Doubles = npt.NDArray[np.float64]
SHRINKAGE = 0.5
"""Share of the mean eigenvalue that is added to each eigenvalue of the covariance."""
_FEATURE_BITS = 20
_LARGEST = 1e100
"""Limit above which features count as not finite, because their squares could overflow."""
_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding cannot leave it."""
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
    features: npt.NDArray[np.floating],
    labels: npt.NDArray[np.int64],
    *,
    grid_bits: int,
    feature_norm: float,
    covariance_norm: float,
    mean_weight: float,
) -> tuple[npt.NDArray[np.int64], float]:
    """Returns the record of one user, `(mean_weight x mean, covariance)`, clipped.

    Each feature vector is first clipped to `feature_norm` and divided by it. The covariance is
    that of images around the mean of their label, and is clipped to `covariance_norm` and divided
    by it. The parts have norms of at most `mean_weight` and 1, and together at most the clip.
    Formal guarantee: the integer vector has norm at most 2^grid_bits. A user without images, or
    with a feature that is not finite, has a record of zeros.

    Args:
      features: `[images, features]`.
      labels: `[images]`.
      grid_bits: grid bits of the plan: a record of the clip's length is 2^grid_bits long.
      feature_norm: public norm that longer features are clipped to.
      covariance_norm: public Frobenius norm that larger covariances are clipped to, in units of
        the squared `feature_norm`.
      mean_weight: public weight of the mean.

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
    whole = np.trunc(exact / np.maximum(feature_norm, length) * 2.0**_FEATURE_BITS)
    within = whole.T @ whole / images
    for label in np.unique(labels):
        summed = whole[labels == label].sum(0)
        within -= np.outer(summed, summed) / (int((labels == label).sum()) * images)
    entries, weights = _triangle(dim)
    covariance = within.ravel()[entries] * weights * 2.0 ** (-2 * _FEATURE_BITS)
    norm = float(np.sqrt(np.square(covariance).sum()))
    mean = whole.sum(0) / (images * 2.0**_FEATURE_BITS)
    record = np.concatenate([mean_weight * mean, covariance / max(covariance_norm, norm)])
    radius = 2.0**grid_bits / math.hypot(1.0, mean_weight) * (1.0 - _SLACK)
    return np.trunc(record * radius).astype(np.int64), norm


def solve_whitening(
    mean: npt.NDArray[np.floating],
    *,
    features: int,
    feature_norm: float,
    mean_weight: float,
    ridge: float,
) -> tuple[Doubles, Doubles]:
    """Computes the projection from a noised mean record; this is post-processing.

    Noise may make eigenvalues of the covariance negative; they are set to at least zero.

    Args:
      mean: noised mean record in units of the clip, `[covariance_size(features)]`.
      features: number of features.
      feature_norm: as in `covariance_record`.
      mean_weight: as in `covariance_record`.
      ridge: value added to each eigenvalue, in units of the clip.

    Returns:
      Kernel `[features, features]`, symmetric, and bias `[features]`: features minus their mean,
      divided by the square root of the covariance. The largest gain is 1.
    """
    exact = mean.astype(np.float64) * math.hypot(1.0, mean_weight)
    entries, weights = _triangle(features)
    covariance = np.zeros(features * features)
    covariance[entries] = exact[features:] / weights
    covariance = covariance.reshape(features, features)
    covariance = covariance + np.triu(covariance, 1).T
    values, vectors = np.linalg.eigh(covariance)
    level = SHRINKAGE * max(float(np.trace(covariance)), 0.0) / features
    level += ridge * math.hypot(1.0, mean_weight)
    values = np.maximum(values, 0.0) + max(level, _TINY)
    kernel = (vectors * np.sqrt(values.min() / values)) @ vectors.T
    return kernel, -(exact[:features] * (feature_norm / mean_weight)) @ kernel
