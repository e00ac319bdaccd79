"""What an epsilon means: attack rates are exact where a closed form exists, and never too low."""

import math
import re

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from scipy.special import ndtr, ndtri

from fedemb.keys import derive
from fedemb.privacy.noise import gaussian, tensor_key
from fedemb.privacy.prices import (
    FALSE_POSITIVE_RATES,
    attack_bound,
    attack_rates,
    guarantee_of,
    rounded_up,
)
from fedemb.privacy.registry import plan_mechanism
from fedemb.reports.privacy_text import meaning
from fedemb.training.audit import NoiseReceipts
from tests.kit.pipeline_runs import honest_run
from tests.kit.privacy_worlds import make_plan
from tests.statistical.independent_epsilon import Composed, Pair

ADD, ONE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


@pytest.mark.planted_bug(15)
@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 5.0])
def test_gaussian_attack_rates_equal_the_closed_form(noise_multiplier):
    found = attack_rates(dpe.GaussianDpEvent(noise_multiplier), ADD)
    assert tuple(rate for rate, _ in found) == FALSE_POSITIVE_RATES
    for rate, highest in found:
        exact = float(ndtr(ndtri(rate) + 1 / noise_multiplier))
        assert exact <= highest <= exact * (1 + 1e-4)


def best_attack(pairs, rounds, rate):
    """Returns the true positive rate of the likelihood-ratio test, by independent code."""
    best = 0.0
    for pair in pairs:
        losses, logs = Composed(pair, rounds).curve(1e-2)
        hits = np.exp(logs[::-1]).cumsum()
        false = np.exp(np.minimum(logs - losses, 0.0)[::-1]).cumsum()
        best = max(best, float(np.interp(rate, false, hits)))
    return best


@pytest.mark.planted_bug(15)
@pytest.mark.parametrize(("relation", "names"), [(ADD, ("remove", "add")), (ONE, ("replace",))])
def test_no_attack_on_sampled_rounds_exceeds_its_bound(relation, names):
    q, sigma, rounds = 0.02, 1.0, 1_000
    sampled = dpe.PoissonSampledDpEvent(q, dpe.GaussianDpEvent(sigma))
    found = attack_rates(dpe.SelfComposedDpEvent(sampled, rounds), relation)
    for rate, highest in found:
        truth = best_attack([Pair(name, q, sigma) for name in names], rounds, rate)
        assert truth * (1 - 1e-5) <= highest <= truth * 1.01


def test_bound_of_one_guarantee_follows_its_definition():
    """Randomised response reaches the bound of pure differential privacy."""
    for epsilon in (0.1, 1.0, 3.0):
        lie = 1 / (1 + math.exp(epsilon))
        assert attack_bound(epsilon, 0.0, lie) == pytest.approx(1 - lie)
    assert attack_bound(0.0, 0.0, 0.01) == 0.01
    assert attack_bound(0.0, 0.2, 0.01) == pytest.approx(0.21)
    assert attack_bound(math.inf, 1e-5, 0.01) == 1.0


def test_attack_finds_every_unit_without_noise():
    assert attack_rates(dpe.NonPrivateDpEvent(), ADD) == [(r, 1.0) for r in FALSE_POSITIVE_RATES]


@pytest.mark.planted_bug(15)
def test_epsilon_is_rounded_up():
    numbers = np.random.default_rng(0).lognormal(0, 5, 2_000)
    for number in numbers:
        assert number <= rounded_up(float(number)) * (1 + 1e-9)
        assert rounded_up(float(number)) <= number * 1.011
    assert rounded_up(0.05) == 0.05
    assert rounded_up(0.05004) == 0.0501


@pytest.mark.planted_bug(15)
def test_text_shows_no_rate_below_the_exact_one():
    config = honest_run.config()
    plan = plan_mechanism(config)
    found = meaning(plan, guarantee_of(plan, config.policy.delta))
    assert found is not None
    shares = [float(text) / 100 for text in re.findall(r"([\d.]+) %", found)]
    shown = dict(zip(shares[::2][:1] + shares[3::2], shares[1::2][:1] + shares[2::2], strict=True))
    for rate, highest in attack_rates(plan.event(), plan.relation):
        assert highest * (1 - 1e-9) <= shown[rate] <= min(1.0, highest * 1.011)


def test_infinite_epsilon_has_no_attack_rate_text():
    config = honest_run.config()
    plan = plan_mechanism(config)
    guarantee = guarantee_of(plan, config.policy.delta)
    from dataclasses import replace

    assert meaning(plan, replace(guarantee, epsilon=math.inf)) is None


# ---- Receipts of noise: sound mechanisms pass, mechanisms that are off do not ----


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
def test_correct_noise_passes_the_receipt_check_in_200_runs():
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
def test_wrong_noise_fails_the_receipt_check_in_every_round(damage):
    found = receipts_of(b"power", damage)
    assert found.failed == ROUNDS
    assert not found.together


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
def test_slightly_too_little_noise_is_detected_over_a_run():
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


def test_noise_receipts_continue_after_a_resume():
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
