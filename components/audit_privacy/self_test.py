"""Self-test of the auditor on synthetic users, before it reports on real users.

The self-test checks that the auditor detects a planted leak, reports no false leak, does not count
a reversed score as a success, and does not treat a missing score as a low score.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedemb.documents.audit import SelfTest
from fedemb.errors import InputError
from fedemb.evaluation.bootstrap import Estimate
from fedemb.steps.audit_privacy.attack import AttackResult, attack
from fedemb.steps.audit_privacy.scoring import Scoring

USERS = 400
IMAGES = 4
NULL_TRIALS = 40
_SEED = 46


def _trial(
    scoring: Scoring, random: np.random.Generator, leak: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores of members and others, for a model that memorizes its members, or does not."""
    half = USERS // 2
    sides = [scoring.made_up(random, half, IMAGES, told) for told in (leak, False)]
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
