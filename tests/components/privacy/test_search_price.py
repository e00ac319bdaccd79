"""Price of a private search, from formulas written here, and the law of its secret draws."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe
from scipy import stats

from fedemb.config.trials import check_recipes, trial_plan
from fedemb.errors import ArtifactError, ConfigError
from fedemb.keys import derive
from fedemb.ledger.budget import Charge, lowered
from fedemb.privacy.accounting.accounting import RDP_ORDERS, price, rdp_of
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.mechanisms.registry import plan_from_json, plan_mechanism
from fedemb.privacy.mechanisms.search import SearchTerms
from fedemb.privacy.planning.prices import guarantee_of
from fedemb.privacy.randomness.trials import draw_trials, probabilities, trials_at
from tests.kit.pipeline_runs.honest_run import config

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
LAWS = ("logarithmic", "geometric", "poisson")
ROUNDS, SIGMA, DELTA = 8, 6.0, 1e-6


def searching(mean=5, law="logarithmic", recipes=None, **changes):
    """The configuration of a private search."""
    found = recipes or {"a": {}, "b": {"mechanism.l2_norm_clip": 0.5}}
    search = {"mean_trials": mean, "law": law, "recipes": found}
    return config(**changes, tuning={"data": "search", "method": "grid", "search": search})


def divergence(order):
    """Rényi divergence of eight Gaussian rounds under add or remove."""
    return ROUNDS * order / (2 * SIGMA**2)


def gamma_of(mean, law):
    """Parameter of the truncated negative binomial law with this mean (arXiv 2110.03620)."""
    if law == "geometric":
        return 1 / mean
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = (low + high) / 2
        if (1 / middle - 1) / math.log(1 / middle) > mean:
            low = middle
        else:
            high = middle
    return middle


def search_divergence(order, mean, law):
    """Theorem 2 (negative binomial) and theorem 6 (Poisson) of arXiv 2110.03620."""
    others = np.concatenate([np.linspace(1.001, 50, 20_000), np.geomspace(50, 1e4, 4000)])
    if law != "poisson":
        eta, gamma = (1.0 if law == "geometric" else 0.0), gamma_of(mean, law)
        second = (1 - 1 / others) * divergence(others) + math.log(1 / gamma) / others
        return divergence(order) + (1 + eta) * second.min() + math.log(mean) / (order - 1)
    epsilon = math.log1p(1 / (order - 1))
    # Smallest delta at this epsilon, from the divergences at all other orders.
    logs = (others - 1) * (divergence(others) - epsilon + np.log1p(-1 / others)) - np.log(others)
    return divergence(order) + mean * math.exp(logs.min()) + math.log(mean) / (order - 1)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [1.5, 10, 200])
def test_search_costs_what_the_theorems_say(law, mean):
    """Never below the formulas, and above them by no more than the coarser grid of orders."""
    trial = dpe.SelfComposedDpEvent(dpe.GaussianDpEvent(SIGMA), ROUNDS)
    event = SearchTerms(mean_trials=mean, law=law).event(trial)
    for order in (2.0, 3.7, 8.0, 32.0):
        found = float(rdp_of(event, ADD, [order])[0])
        expected = search_divergence(order, mean, law)
        if law != "poisson":  # a divergence grows with its order
            expected = min(
                expected, *(search_divergence(float(o), mean, law) for o in RDP_ORDERS if o > order)
            )
        assert expected * (1 - 1e-6) <= found <= expected * 1.02


@pytest.mark.parametrize("law", LAWS)
def test_whole_search_is_priced_and_not_one_trial(law):
    plan = plan_mechanism(searching(law=law))
    one, whole = (guarantee_of(item, DELTA) for item in (plan.replaced(search=None), plan))
    assert 1.2 * one.epsilon < whole.epsilon < 5 * one.epsilon
    assert whole.accountant == "rdp"
    assert whole.sampler_delta > 4 * one.sampler_delta, "every trial draws noise"
    assert plan.event() == dpe.RepeatAndSelectDpEvent(
        plan.replaced(search=None).event(), 5.0, {"logarithmic": 0, "geometric": 1}.get(law, np.inf)
    )


def test_one_order_of_the_filter_uses_the_best_second_order():
    event = plan_mechanism(searching()).event()
    relation = NeighboringRelation.REPLACE_ONE
    alone = float(rdp_of(event, relation, [8.0])[0])
    every = rdp_of(event, relation, RDP_ORDERS)
    assert alone == float(every[list(RDP_ORDERS).index(8.0)])


def test_search_stays_charged_in_full_whatever_the_best_trial_ran():
    event = plan_mechanism(searching()).event()
    assert all(lowered(event, 6, charged) is event for charged in (0, 3, 6))
    charge = Charge(1, "r", json.dumps(event_to_json(event)).encode(), "REPLACE_ONE", 6, 6)
    assert charge.trainings == 5


def test_plan_of_a_search_has_its_own_schema_and_reads_back():
    plan, single = plan_mechanism(searching()), plan_mechanism(config())
    assert plan_from_json(plan.to_json()) == plan
    assert "search" not in single.to_json()
    for broken in (
        {**plan.to_json(), "schema": single.to_json()["schema"]},
        {**single.to_json(), "schema": plan.to_json()["schema"]},
    ):
        with pytest.raises(ArtifactError):
            plan_from_json(broken)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"mechanism.noise_multiplier": 1.9}, "costs more privacy"),
        ({"mechanism.sampling_probability": 0.06}, "costs more privacy"),
        ({"mechanism.rounds": 7, "mechanism.noise_multiplier": 9.0}, "has 7 rounds"),
        # Cheaper at all orders below 15, and dearer above.
        ({"mechanism.rounds": 1, "mechanism.noise_multiplier": 1.5}, "costs more privacy"),
        # Dearer at all orders below 26, and cheaper above.
        (
            {"mechanism.sampling_probability": 0.2, "mechanism.noise_multiplier": 4.0},
            "costs more privacy",
        ),
    ],
)
def test_recipe_that_costs_more_than_is_priced_is_refused(recipe, problem):
    asked = searching(recipes={"a": {}, "dear": recipe})
    with pytest.raises(ConfigError, match=rf"recipe 'dear' of tuning.search {problem}"):
        check_recipes(asked, plan_mechanism(asked))


def test_recipe_whose_price_is_no_number_is_refused(monkeypatch):
    asked = searching(recipes={"a": {}, "b": {"mechanism.noise_multiplier": 2.5}})
    plan = plan_mechanism(asked)
    check_recipes(asked, plan)
    monkeypatch.setattr(
        "fedemb.privacy.accounting.accounting.rdp_of",
        lambda event, relation, orders: np.full(len(orders), np.nan),
    )
    with pytest.raises(ConfigError, match=r"recipe 'b' of tuning.search costs more privacy"):
        check_recipes(asked, plan)


def test_recipe_outside_the_list_trains_nothing():
    for asked in (searching(), config()):
        with pytest.raises(ConfigError, match=r"recipe 'other' is not in tuning\.search"):
            asked.tuned("other")


def test_recipe_may_cost_as_much_or_less():
    cheaper = {"mechanism.rounds": 4, "mechanism.noise_multiplier": 2.5}
    asked = searching(recipes={"a": {}, "b": cheaper, "c": {"mechanism.l2_norm_clip": 9.0}})
    plan = plan_mechanism(asked)
    check_recipes(asked, plan)
    trial = trial_plan(plan, asked, "b")
    assert (trial.rounds, trial.noise_multiplier, trial.search) == (4, 2.5, None)


@pytest.mark.parametrize("law", LAWS)
def test_probabilities_are_those_of_the_priced_law(law):
    mean, gamma = 5.0, gamma_of(5.0, law) if law != "poisson" else 0.0
    expected = {
        "logarithmic": lambda k: (1 - gamma) ** k / (k * math.log(1 / gamma)),
        "geometric": lambda k: gamma * (1 - gamma) ** (k - 1),
        "poisson": lambda k: math.exp(-mean) * mean**k / math.factorial(k),
    }[law]
    total = found_mean = 0.0
    for number, chance in probabilities(law, mean):
        if number > 10 and chance < 1e-18:
            break
        assert float(chance) == pytest.approx(expected(number), rel=1e-9)
        total, found_mean = total + float(chance), found_mean + number * float(chance)
    assert total == pytest.approx(1, abs=1e-9)
    assert found_mean == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("law", LAWS)
def test_draws_follow_the_law_and_recipes_are_uniform(law):
    keys = [derive(b"k" * 32, str(index)) for index in range(4000)]
    drawn = [draw_trials(key, law, 3.0, 5) for key in keys]
    counts = Counter(map(len, drawn))
    chances, number = [], -1
    for number, chance in probabilities(law, 3.0):
        chances.append((number, float(chance)))
        if float(chance) * len(keys) < 8 and number > 3:
            break
    left = 1 - sum(chance for _, chance in chances)
    seen = [counts[number] for number, _ in chances]
    seen.append(len(keys) - sum(seen))
    expected = [chance * len(keys) for _, chance in chances] + [left * len(keys)]
    assert stats.chisquare(seen, np.array(expected) * sum(seen) / sum(expected)).pvalue > 1e-6
    recipes = Counter(recipe for trials in drawn for recipe in trials)
    assert sorted(recipes) == [0, 1, 2, 3, 4]
    assert stats.chisquare(list(recipes.values())).pvalue > 1e-6


def test_draws_follow_from_the_secret_key_alone():
    one = draw_trials(b"a" * 32, "geometric", 50.0, 7)
    assert draw_trials(b"a" * 32, "geometric", 50.0, 7) == one
    others = {tuple(draw_trials(bytes([n]) * 32, "geometric", 50.0, 7)) for n in range(20)}
    assert len(others) == 20


def test_only_poisson_may_have_no_trial():
    assert [trials_at(0, law, 3.0) for law in LAWS] == [1, 1, 0]
    assert all(trials_at(2**256 - 1, law, 3.0) < 2000 for law in LAWS)


def test_price_of_the_search_in_the_ledger_is_that_of_the_plan():
    """Two searches compose by the filter: twice the divergence at its order."""
    plan = plan_mechanism(searching())
    event, relation = plan.event(), plan.relation
    twice = dpe.SelfComposedDpEvent(event, 2)
    assert float(rdp_of(twice, relation, [8.0])[0]) == 2 * float(rdp_of(event, relation, [8.0])[0])
    assert price(twice, relation, DELTA, runs=2).epsilon > price(event, relation, DELTA).epsilon
