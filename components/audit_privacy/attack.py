"""A membership attack on an embedding model by verification scores, and its success rate.

The score of a user is the similarity among their own images minus the similarity to other users'
images (docs/privacy/audit.md#the-attack-of-a-run; Li et al. 2203.02077): a model that memorizes a
user increases the similarity of their images. Pure functions on arrays; numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedemb.documents.audit import finding
from fedemb.documents.fields import Interval
from fedemb.errors import InputError
from fedemb.evaluation.bootstrap import Estimate, draw_weights
from fedemb.foundation.canonical_json import JsonFields

MIN_USERS = 10
"""Minimum number of users per side; with fewer, an interval is meaningless."""


@dataclass(frozen=True)
class AttackResult:
    """How well scores distinguish members from others.

    Attributes:
      auroc: probability that a member scores above another user; 0.5 is chance, less is reversed.
      tpr_at_fpr: per false positive rate, share of members above the threshold.
    """

    auroc: Estimate
    tpr_at_fpr: dict[float, Estimate]

    @property
    def finding(self) -> str:
        """`leak`, `reversed` (members score lower, significantly) or `nothing`."""
        return finding(Interval.model_validate(self.auroc.to_json()))

    def to_json(self) -> JsonFields:
        """Returns `Attacked` of the audit report."""
        return {
            "auroc": self.auroc.to_json(),
            "tpr_at_fpr": {f"{rate:g}": e.to_json() for rate, e in self.tpr_at_fpr.items()},
        }


def verification_scores(embeddings: np.ndarray, owners: np.ndarray, users: int) -> np.ndarray:
    """Returns mean cosine within each user minus mean cosine to the images of all other users.

    Args:
      embeddings: float32 [images, dim], unit norm.
      owners: int [images], user of each image, 0..users-1.
      users: number of users.

    Returns:
      float64 [users]; NaN for a user with fewer than two images.
    """
    dim = embeddings.shape[1]
    sums = np.zeros((users, dim))
    np.add.at(sums, owners, embeddings.astype(np.float64))
    squares = np.bincount(owners, (embeddings.astype(np.float64) ** 2).sum(1), minlength=users)
    counts = np.bincount(owners, minlength=users).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        within = ((sums**2).sum(1) - squares) / (counts * (counts - 1))
        means = sums / counts[:, None]
    known = counts > 0
    total, others = means[known].sum(0), known.sum() - 1
    across = (means @ total - (means**2).sum(1)) / max(others, 1)
    return np.where(counts > 1, within - across, np.nan)


def _checked(scores: np.ndarray, side: str) -> np.ndarray:
    scores = np.asarray(scores, np.float64)
    bad = int((~np.isfinite(scores)).sum())
    if scores.ndim != 1 or len(scores) < MIN_USERS or bad:
        raise InputError(
            f"The attack needs at least {MIN_USERS} finite scores of {side}, got "
            f"{len(scores)}, {bad} of them not finite. Check the model for weights that are "
            "not finite."
        )
    return scores


def attack(
    members: np.ndarray,
    others: np.ndarray,
    *,
    false_positive_rates: tuple[float, ...] = (0.001, 0.01, 0.1),
    samples: int,
    seed: int = 0,
) -> AttackResult:
    """Measures how well scores distinguish members from others, with intervals over both sides.

    The direction is fixed beforehand: a member should score higher. A reversed score gives an AUROC
    below one half, never a good one.

    Args:
      members: scores of training users.
      others: scores of users that never trained.
      false_positive_rates: share of others that may be called members; each threshold is the
        (floor(rate * others) + 1)-th largest score of others, and a member is called above it.
      samples: number of bootstrap draws.
      seed: seed of the draws.

    Raises:
      InputError: too few scores, or one that is not finite.
    """
    members, others = _checked(members, "members"), _checked(others, "others")
    member_weights = draw_weights(len(members), samples, seed)
    other_weights = draw_weights(len(others), samples, seed + 1)
    ones = (np.ones((1, len(members))), np.ones((1, len(others))))
    return AttackResult(
        auroc=Estimate(
            float(_auroc(members, others, *ones)[0]),
            _auroc(members, others, member_weights, other_weights),
        ),
        tpr_at_fpr={
            rate: Estimate(
                float(_tpr(members, others, *ones, rate)[0]),
                _tpr(members, others, member_weights, other_weights, rate),
            )
            for rate in false_positive_rates
        },
    )


def _auroc(
    members: np.ndarray, others: np.ndarray, member_weights: np.ndarray, other_weights: np.ndarray
) -> np.ndarray:
    """Returns the weighted probability that a member scores higher, ties count half, [draws]."""
    order = np.argsort(others)
    running = np.cumsum(other_weights[:, order], axis=1, dtype=np.float64)
    running = np.concatenate([np.zeros((len(running), 1)), running], axis=1)
    below = running[:, np.searchsorted(others[order], members, side="left")]
    not_above = running[:, np.searchsorted(others[order], members, side="right")]
    wins = (member_weights * (below + not_above) / 2).sum(1)
    return wins / (member_weights.sum(1, dtype=np.float64) * running[:, -1])


def _tpr(
    members: np.ndarray,
    others: np.ndarray,
    member_weights: np.ndarray,
    other_weights: np.ndarray,
    rate: float,
) -> np.ndarray:
    """Returns the weighted share of members above the threshold of the others, [draws]."""
    order = np.argsort(others)[::-1]
    running = np.cumsum(other_weights[:, order], axis=1, dtype=np.float64)
    rank = np.floor(rate * running[:, -1]) + 1
    place = (running < rank[:, None]).sum(1).clip(max=len(others) - 1)
    called = members[None, :] > others[order][place][:, None]
    return (member_weights * called).sum(1) / member_weights.sum(1, dtype=np.float64)
