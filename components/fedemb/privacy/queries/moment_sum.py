"""Exact sums of second moments, the private statistics of a least-squares head.

Mehta et al. (TMLR 2023, arXiv 2211.13403): a ridge solution follows from `sum of u u^T` and `sum of
u y^T`, so one noised round is enough for a linear head. A feature vector u is clipped to a ball
before any product is computed, and is an integer vector from then on. The sums are matrix products
of integers below 2^53, so they are exact and independent of order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedemb.errors import ConfigError

Doubles = npt.NDArray[np.float64]
CONSTANT = 0.3
"""Value of the bias feature; the other features have norm at most 1."""
_EXACT = 2.0**53
_LARGEST = 1e100
"""Limit above which features count as not finite, because their squares could overflow."""
_SLACK = 2.0**-26
"""Relative margin inside the ball, so that float64 rounding cannot leave it."""


def moment_size(features: int, classes: int) -> int:
    """Returns the entries of a record: `(features + 1)^2 + (features + 1) * classes`."""
    return (features + 1) * (features + 1 + classes)


def moment_sum(
    features: npt.NDArray[np.floating],
    labels: npt.NDArray[np.int64],
    *,
    classes: int,
    grid_bits: int,
    feature_norm: float,
    label_weight: float,
) -> npt.NDArray[np.int64]:
    """Sums the records of units, `(u u^T, label_weight x u y^T)` averaged over a unit's images.

    u is `(x clipped to feature_norm / feature_norm, 0.3) / sqrt(1.09)`, so |u| <= 1, and y is 1 at
    the label. Formal guarantee: the integer vector of any unit has norm at most 2^grid_bits, both
    parts together; a unit with a feature that is not finite contributes zero.

    Args:
      features: `[units, images, features]`.
      labels: `[units, images]`, below `classes`; negative for missing images.
      classes: public number of classes.
      grid_bits: grid bits of the plan: a record of the clip's length is 2^grid_bits long.
      feature_norm: public norm that longer features are clipped to.
      label_weight: public weight of the second part.

    Returns:
      int64 `[moment_size(features, classes)]`.

    Raises:
      ConfigError: too many images at once for an exact sum.
    """
    images = labels >= 0
    whole, weights = whole_vectors(
        features, images, grid_bits=grid_bits, feature_norm=feature_norm, label_weight=label_weight
    )
    rows = whole.shape[-1]
    largest = 2.0**grid_bits * max(1.0, label_weight)
    if labels.size * largest > _EXACT:
        raise ConfigError(
            f"{labels.size} images at once are too many for one exact sum; lower "
            "training.unit_gradient.images_per_unit"
        )
    targets = (labels[..., None] == np.arange(classes)) * weights[..., None]
    flat = whole.reshape(-1, rows)
    sums = flat.T @ np.concatenate([flat, targets.reshape(-1, classes)], axis=1)
    parts = [sums[:, :rows].ravel(), sums[:, rows:].ravel()]
    return np.concatenate(parts).astype(np.int64)


def whole_vectors(
    features: npt.NDArray[np.floating],
    images: npt.NDArray[np.bool_],
    *,
    grid_bits: int,
    feature_norm: float,
    label_weight: float,
) -> tuple[Doubles, Doubles]:
    """Returns vectors u and label weights as integers, for images of equal share in their unit.

    Returns:
      float64 `[units, images, features + 1]`, of norm at most r / sqrt(images of the unit), and
      `[units, images]`, at most `label_weight` times that, with r^2 sqrt(1 + label_weight^2) =
      2^grid_bits.
    """
    exact = features.astype(np.float64)
    finite = np.all((np.abs(exact) < _LARGEST) | ~images[..., None], axis=(1, 2))
    taken = images & finite[:, None]
    exact = np.where(taken[..., None], exact, 0.0)
    length = np.sqrt(np.square(exact).sum(-1, keepdims=True))
    shortened = exact / np.maximum(feature_norm, length)
    constant = np.full((*images.shape, 1), CONSTANT)
    vectors = np.concatenate([shortened, constant], axis=-1) / math.hypot(1.0, CONSTANT)
    count = np.maximum(1, images.sum(1, keepdims=True))
    radius = math.sqrt(2.0**grid_bits / math.hypot(1.0, label_weight)) * (1.0 - _SLACK)
    share = np.where(taken, radius / np.sqrt(count), 0.0)
    return np.trunc(vectors * share[..., None]), np.trunc(label_weight * share)


def solve_moments(
    mean: npt.NDArray[np.floating], *, classes: int, ridge: float, label_weight: float
) -> tuple[Doubles, Doubles]:
    """Computes the head from a noised mean record; this is post-processing.

    Noise may make eigenvalues of the second moments negative; they are set to at least zero.

    Args:
      mean: noised mean record in units of the clip, `[moment_size(features, classes)]`.
      classes: public number of classes.
      ridge: value added to each eigenvalue, in the same units.
      label_weight: as in `moment_sum`.

    Returns:
      Kernel `[features, classes]` on features divided by `feature_norm`, and bias `[classes]`.
    """
    rows = round((math.sqrt(classes**2 + 4 * len(mean)) - classes) / 2)
    exact = mean.astype(np.float64)
    second = exact[: rows * rows].reshape(rows, rows)
    # Both triangles have independent noise; their mean has half its variance.
    values, vectors = np.linalg.eigh((second + second.T) / 2)
    against = exact[rows * rows :].reshape(rows, classes) / label_weight
    head = vectors @ ((vectors.T @ against) / (np.maximum(values, 0.0) + ridge)[:, None])
    head = head / math.hypot(1.0, CONSTANT)
    return head[:-1], head[-1] * CONSTANT
