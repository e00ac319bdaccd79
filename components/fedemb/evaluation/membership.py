"""Membership inference attacks on embeddings: scores, the attack, and its test on itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedemb.config import RunConfig
from fedemb.documents.audit import Attack, SelfTest, finding
from fedemb.documents.fields import Interval
from fedemb.errors import InputError
from fedemb.evaluation.pairs import Estimate, draw_weights
from fedemb.foundation.canonical_json import JsonFields
from fedemb.models.inference import classify, embed

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
    units = min(len(members), len(others))
    return AttackResult(
        auroc=Estimate(
            float(_auroc(members, others, *ones)[0]),
            _auroc(members, others, member_weights, other_weights),
            units,
        ),
        tpr_at_fpr={
            rate: Estimate(
                float(_tpr(members, others, *ones, rate)[0]),
                _tpr(members, others, member_weights, other_weights, rate),
                units,
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


_TINY = 1e-30
"""Constant below every float32 probability, so that a class of probability 0 has finite odds."""


# A score maps images to one number per user; a member should score higher.


class VerificationScore:
    """Mean cosine within a user minus mean cosine to others."""

    attack: Attack = "verification_score"
    least_images = 2
    """Minimum number of images of a scored user."""

    apply = staticmethod(embed)

    def values(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns embeddings of unit length."""
        return outputs

    def scores(self, values: np.ndarray, owners: np.ndarray, users: int) -> np.ndarray:
        """Returns one score per user, float64 `[users]`, see `verification_scores`.

        Args:
          values: results of `values` for all images; finite.
          owners: int `[images]`, user of each image, 0..users-1.
          users: number of users.
        """
        return verification_scores(values, owners, users)

    def synthetic(
        self, random: np.random.Generator, users: int, images: int, leak: bool
    ) -> np.ndarray:
        """Returns points around a centre; a leak moves them together."""
        centres = random.normal(size=(users, 1, 32))
        points = centres + (0.8 if leak else 1.0) * random.normal(size=(users, images, 32))
        points /= np.linalg.norm(points, axis=2, keepdims=True)
        return points.reshape(users * images, -1).astype(np.float32)


class ConfidenceScore:
    """Mean log-odds of the label over a unit's images."""

    attack: Attack = "confidence_score"
    least_images = 1

    apply = staticmethod(classify)

    def values(self, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns the log-odds of each image's label, float64 `[images]`."""
        probabilities = outputs.astype(np.float64)
        wanted = labels[:, None] == np.arange(probabilities.shape[1])
        right = (probabilities * wanted).sum(1)
        wrong = (probabilities * ~wanted).sum(1)
        return np.log(right + _TINY) - np.log(wrong + _TINY)

    def scores(self, values: np.ndarray, owners: np.ndarray, users: int) -> np.ndarray:
        """Returns the mean over each unit's images; NaN for a unit without images."""
        counts = np.bincount(owners, minlength=users)
        with np.errstate(invalid="ignore"):
            return np.bincount(owners, values, minlength=users) / counts

    def synthetic(
        self, random: np.random.Generator, users: int, images: int, leak: bool
    ) -> np.ndarray:
        """Returns easy and hard units; a leak makes the model more confident."""
        hard = random.normal(size=(users, 1)) + (1.0 if leak else 0.0)
        return (hard + random.normal(size=(users, images))).ravel()


Scoring = VerificationScore | ConfidenceScore


def scoring_of(config: RunConfig) -> Scoring:
    """Returns the score for the run's task."""
    return ConfidenceScore() if config.task == "classification" else VerificationScore()


USERS = 400
IMAGES = 4
NULL_TRIALS = 40
_SEED = 46


def _trial(
    scoring: Scoring, random: np.random.Generator, leak: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores of members and others, for a model that memorizes its members, or does not."""
    half = USERS // 2
    sides = [scoring.synthetic(random, half, IMAGES, told) for told in (leak, False)]
    owners = np.repeat(np.arange(USERS), IMAGES)
    scores = scoring.scores(np.concatenate(sides), owners, USERS)
    return scores[:half], scores[half:]


def self_test(scoring: Scoring, run_attack: Callable[..., AttackResult] = attack) -> SelfTest:
    """Runs the planted cases through scoring and attack; only tests pass another attack.

    Returns:
      The result of each case. The figures are of synthetic users and the same in every run.
    """
    random = np.random.default_rng(np.random.SeedSequence([_SEED]))
    nulls = [
        run_attack(*_trial(scoring, random, False), samples=100, seed=trial)
        for trial in range(NULL_TRIALS)
    ]
    mean = float(np.mean([result.auroc.value for result in nulls]))
    alarms = sum(result.finding != "nothing" for result in nulls)
    members, others = _trial(scoring, random, True)
    planted = run_attack(members, others, samples=100)
    flipped = run_attack(-members, -others, samples=100)
    missing = members.copy()
    missing[3] = np.nan
    return SelfTest.model_validate(
        {
            "no_leak": {"auroc": round(mean, 3), "alarms": alarms, "trials": NULL_TRIALS},
            "planted_leak": _rounded(planted.auroc),
            "reversed_sign": _rounded(flipped.auroc),
            "missing_score_refused": _refuses(run_attack, missing, others),
            "missing_side_refused": _refuses(run_attack, members, others[:0]),
        }
    )


def _rounded(auroc: Estimate) -> dict[str, float]:
    return {name: round(value, 3) for name, value in auroc.to_json().items()}


def _refuses(
    run_attack: Callable[..., AttackResult], members: np.ndarray, others: np.ndarray
) -> bool:
    try:
        run_attack(members, others, samples=20)
    except InputError:
        return True
    return False
