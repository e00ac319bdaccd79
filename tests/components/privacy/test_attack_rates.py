"""What an epsilon means: attack rates are exact where a closed form exists, and never too low."""

import math
import re

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from scipy.special import ndtr, ndtri

from fedemb.privacy.prices import (
    FALSE_POSITIVE_RATES,
    attack_bound,
    attack_rates,
    guarantee_of,
    rounded_up,
)
from fedemb.privacy.registry import plan_mechanism
from fedemb.reports.privacy_words import meaning
from tests.kit.pipeline_runs import honest_run
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


def test_without_noise_every_unit_is_found():
    assert attack_rates(dpe.NonPrivateDpEvent(), ADD) == [(r, 1.0) for r in FALSE_POSITIVE_RATES]


@pytest.mark.planted_bug(15)
def test_figures_are_rounded_up_only():
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


def test_guarantee_without_finite_epsilon_has_no_meaning():
    config = honest_run.config()
    plan = plan_mechanism(config)
    guarantee = guarantee_of(plan, config.policy.delta)
    from dataclasses import replace

    assert meaning(plan, replace(guarantee, epsilon=math.inf)) is None
