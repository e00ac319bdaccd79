"""Receipts of noise: sound mechanisms pass, mechanisms that are off do not.

By design a sound run fails a check with chance 2e-9 (six standard deviations). Measured here: no
false alarm in 200 sound runs, with fixed keys.
"""

import math

import numpy as np
import pytest

from fedemb.keys import derive
from fedemb.privacy.noise import gaussian, tensor_key
from fedemb.training.audit import NoiseReceipts
from tests.kit.privacy_worlds import make_plan

DIM, ROUNDS = 3000, 6
PLAN = {"noise_multiplier": 0.83, "sampling_probability": 0.1, "virtual_clients": 300}


def receipts_of(key, damage=lambda total, noise: total + noise, **changes):
    """Receipts of a run whose sums are as long as thirty clients can make them."""
    plan = make_plan(rounds=ROUNDS, **{**PLAN, **changes})
    receipts = NoiseReceipts(plan, key)
    random = np.random.default_rng(list(key))
    for number in range(ROUNDS):
        tag = derive(key, str(number))
        total = random.normal(size=DIM)
        total *= random.uniform(0, 30) / np.linalg.norm(total)
        noise = gaussian(tensor_key(key, tag, "update"), DIM) * plan.noise_multiplier
        mean = (damage(total, noise) / plan.normalizer).astype(np.float32)
        receipts.add(mean, tag)
    return receipts.found


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
def test_sound_noise_has_its_receipt_in_200_runs():
    for number in range(200):
        found = receipts_of(derive(b"null", str(number)))
        assert (found.rounds, found.failed, found.together) == (ROUNDS, 0, True), number


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
@pytest.mark.parametrize(
    "damage",
    [
        lambda total, noise: total,
        lambda total, noise: total + 0.5 * noise,
        lambda total, noise: (total + noise) / max(1, np.linalg.norm(total)),
        lambda total, noise: total + noise[::-1],
        lambda total, noise: 1.41 * (total + noise),
        lambda total, noise: np.full_like(total, math.nan),
    ],
    ids=["discarded", "halved", "shrunk_by_raw_norm", "other_key", "scaled", "nan"],
)
def test_noise_that_is_not_what_was_priced_has_no_receipt(damage):
    found = receipts_of(b"power", damage)
    assert found.failed == ROUNDS
    assert not found.together


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
def test_slightly_too_little_noise_shows_over_a_run():
    """At 22,710 weights and a sum as long as the quickstart's, 3 % are a miss of many sigmas."""
    plan = make_plan(rounds=ROUNDS, **PLAN)
    for scale, sound in ((1.0, True), (0.97, False)):
        receipts = NoiseReceipts(plan, b"k")
        random = np.random.default_rng(1)
        for number in range(ROUNDS):
            total = random.normal(size=22_710)
            total *= 10 / np.linalg.norm(total)
            noise = gaussian(tensor_key(b"k", bytes([number]), "update"), total.size)
            output = (total + scale * plan.noise_multiplier * noise) / plan.normalizer
            receipts.add(output.astype(np.float32), bytes([number]))
        assert receipts.found.together is sound


def test_receipts_go_on_where_they_stood():
    plan, whole, parts = make_plan(rounds=4, **PLAN), None, None
    means = [
        (gaussian(tensor_key(b"k", bytes([n]), "update"), 99) / plan.normalizer).astype(np.float32)
        for n in range(4)
    ]
    whole, parts = NoiseReceipts(plan, b"k"), NoiseReceipts(plan, b"k")
    for number, mean in enumerate(means):
        whole.add(mean, bytes([number]))
        resumed = NoiseReceipts(plan, b"k")
        resumed.figures = parts.figures
        resumed.add(mean, bytes([number]))
        parts = resumed
    assert parts.figures == whole.figures
