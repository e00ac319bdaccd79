"""The auditor audits itself, on made-up users, before it may say anything about real ones.

An auditor that finds nothing is only worth something if it finds what was planted, does not cry
wolf, does not call a reversed score a success, and does not take a missing score for a low one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedemb.errors import InputError
from fedemb.steps.audit_privacy.attack import AttackResult, attack, verification_scores

USERS = 400
IMAGES = 4
DIM = 32
NULL_TRIALS = 40
_SEED = 46


def made_up_embeddings(
    random: np.random.Generator, users: int, spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Unit embeddings [users * IMAGES, DIM] of users with a common `spread`, and their owners."""
    centres = random.normal(size=(users, 1, DIM))
    points = centres + spread * random.normal(size=(users, IMAGES, DIM))
    points /= np.linalg.norm(points, axis=2, keepdims=True)
    return points.reshape(-1, DIM).astype(np.float32), np.repeat(np.arange(users), IMAGES)


def _trial(random: np.random.Generator, member_spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of members and others when the model pulled members' images together, or not."""
    half = USERS // 2
    inside, first = made_up_embeddings(random, half, member_spread)
    outside, second = made_up_embeddings(random, half, 1.0)
    owners = np.concatenate([first, second + half])
    scores = verification_scores(np.concatenate([inside, outside]), owners, USERS)
    return scores[:half], scores[half:]


def self_test(run_attack: Callable[..., AttackResult] = attack) -> dict[str, Any]:
    """Runs the planted cases through scoring and attack.

    Args:
      run_attack: the attack under test; another one only in tests of the self-test.

    Returns:
      A mapping with `passed` and, per case, `passed` and what was seen. The figures are of made-up
      users and the same in every run.
    """
    random = np.random.default_rng(np.random.SeedSequence([_SEED]))
    cases: dict[str, dict[str, Any]] = {}

    nulls = [
        run_attack(*_trial(random, 1.0), samples=100, seed=trial) for trial in range(NULL_TRIALS)
    ]
    mean = float(np.mean([result.auroc.value for result in nulls]))
    alarms = sum(result.finding != "nothing" for result in nulls)
    # 95 % intervals: 40 nulls give 2 alarms on average, more than 7 with chance below 0.2 %.
    cases["no_leak"] = {
        "passed": abs(mean - 0.5) < 0.02 and alarms <= 7,
        "auroc": round(mean, 3),
        "alarms": alarms,
        "trials": NULL_TRIALS,
    }
    members, others = _trial(random, 0.8)
    planted = run_attack(members, others, samples=100)
    cases["planted_leak"] = {
        "passed": planted.finding == "leak" and planted.auroc.value > 0.6,
        "auroc": round(planted.auroc.value, 3),
    }
    flipped = run_attack(-members, -others, samples=100)
    cases["reversed_sign"] = {
        "passed": flipped.finding == "reversed" and flipped.auroc.value < 0.4,
        "auroc": round(flipped.auroc.value, 3),
    }
    missing = members.copy()
    missing[3] = np.nan
    cases["missing_score"] = {"passed": _refuses(run_attack, missing, others)}
    cases["missing_side"] = {"passed": _refuses(run_attack, members, others[:0])}
    return {"passed": all(case["passed"] for case in cases.values()), "cases": cases}


def _refuses(
    run_attack: Callable[..., AttackResult], members: np.ndarray, others: np.ndarray
) -> bool:
    try:
        run_attack(members, others, samples=20)
    except InputError:
        return True
    return False
