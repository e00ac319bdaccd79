"""Random allocation: the price against Monte Carlo, and a sampler that does what is priced."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe
from scipy import stats
from scipy.special import ndtr

from fedemb.errors import ConfigError, UnsupportedAccounting
from fedemb.privacy.accounting import allocation
from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.accounting.allocation import allocation_losses
from fedemb.privacy.accounting.composed_losses import ComposedLosses
from fedemb.privacy.accounting.events import RandomAllocationDpEvent, event_from_json, event_to_json
from fedemb.privacy.accounting.loss_grid import pld_of
from fedemb.privacy.mechanisms.mechanism import Cohort
from fedemb.privacy.mechanisms.random_allocation import RandomAllocation
from tests.kit.privacy_worlds import ROOT, World, make_plan

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


def _sampled_losses(steps, noise, epochs, samples=200_000):
    """Losses of `epochs` epochs with and without the unit, from the sums themselves."""
    random = np.random.default_rng(steps)
    with_unit, without = np.zeros(samples), np.zeros(samples)
    for _ in range(epochs):
        sums = noise * random.normal(size=(samples, steps))
        without += np.log(np.exp((sums - 0.5) / noise**2).mean(1))
        sums[np.arange(samples), random.integers(0, steps, samples)] += 1.0
        with_unit += np.log(np.exp((sums - 0.5) / noise**2).mean(1))
    return with_unit, -without


@pytest.mark.long
@pytest.mark.statistical
@pytest.mark.parametrize(("steps", "noise", "epochs"), [(1, 2.0, 1), (8, 1.0, 1), (8, 1.5, 3)])
def test_price_is_what_sampled_sums_show(steps, noise, epochs):
    """Delta at several epsilons and in both directions; one false alarm in 10^5 runs."""
    parts = [ComposedLosses([(one, epochs)]) for one in allocation_losses(steps, noise, 1e-4)]
    for losses, priced in zip(_sampled_losses(steps, noise, epochs), parts, strict=True):
        for epsilon in (0.1, 0.5, 1.0):
            terms = np.maximum(0.0, -np.expm1(epsilon - losses))
            error = 5 * terms.std() / np.sqrt(len(terms)) + 1e-6
            delta = priced.delta(epsilon)
            assert terms.mean() - error <= delta <= 1.02 * terms.mean() + error


@pytest.mark.parametrize("with_unit", [True, False])
def test_a_coarser_grid_costs_more_and_never_less(monkeypatch, with_unit):
    """Every rounding errs to the side of privacy: of ratios, of losses, and of what is left out."""

    def deltas(grid):
        losses = allocation._losses(8, 2.0, grid, with_unit=with_unit)
        assert losses.infinite > 0
        composed = ComposedLosses([(losses, 1)])
        return [composed.delta(epsilon) for epsilon in (0.1, 0.3, 0.6, 1.0)]

    finest = np.array(deltas(1e-4))
    assert np.all(np.array(deltas(0.05)) > finest)
    monkeypatch.setattr(allocation, "_SPACING", 0.02)
    assert np.all(np.array(deltas(1e-4)) > finest)
    monkeypatch.setattr(allocation, "_SPACING", 2e-4)
    monkeypatch.setattr(allocation, "_TAIL", 3.0)
    assert np.all(np.array(deltas(1e-4)) > finest + ndtr(-3.0)), "what was cut off is lost"


@pytest.mark.parametrize("chance", [0.02, 0.3, 0.9])
def test_what_lies_beyond_the_grid_is_bounded_from_above(chance):
    """Of sums of coins, whose tail is known: nineteen of one kind and one of another."""
    steps, reach = 20, 15
    edges = np.arange(reach + 1, dtype=np.float64)
    absent, last = np.zeros(reach), np.zeros(reach)
    absent[:2], last[:2] = (0.8, 0.2), (1 - chance, chance)
    beyond = stats.binom(steps - 1, 0.2).sf
    exact = (1 - chance) * beyond(reach - 1) + chance * beyond(reach - 2)
    for largest in (1.0, 2.0, 8.0):
        bound = allocation._folded(absent, last, edges, steps, largest)
        assert exact <= bound
    bound = allocation._folded(absent, last, edges, steps, 2.0)
    assert exact <= bound < 20 * exact


def test_one_round_an_epoch_is_the_plain_gaussian():
    event = dpe.SelfComposedDpEvent(RandomAllocationDpEvent(1, dpe.GaussianDpEvent(4.0)), 4)
    plain = dpe.GaussianDpEvent(2.0)
    assert price(event, ADD, 1e-5).epsilon == pytest.approx(
        price(plain, ADD, 1e-5).epsilon, rel=2e-3
    )


@pytest.mark.long
def test_it_costs_no_more_than_poisson_sampling_and_far_less_than_none():
    steps, epochs, noise = 10, 4, 1.2
    allocated = dpe.SelfComposedDpEvent(
        RandomAllocationDpEvent(steps, dpe.GaussianDpEvent(noise)), epochs
    )
    poisson = dpe.SelfComposedDpEvent(
        dpe.PoissonSampledDpEvent(1 / steps, dpe.GaussianDpEvent(noise)), steps * epochs
    )
    known = dpe.SelfComposedDpEvent(dpe.GaussianDpEvent(noise), epochs)
    ours, theirs, none = (price(event, ADD, 1e-5).epsilon for event in (allocated, poisson, known))
    assert ours < theirs < none / 1.5
    assert pld_of(allocated, ADD).get_delta(ours) <= 1.01e-5


def test_what_was_not_proved_is_refused():
    """Whole virtual clients stay and change: that pair has no price here."""
    event = RandomAllocationDpEvent(4, dpe.GaussianDpEvent(1.0))
    assert event_from_json(event_to_json(event)) == event
    with pytest.raises(UnsupportedAccounting):
        price(event, NeighboringRelation.REPLACE_ONE, 1e-5)
    with pytest.raises(UnsupportedAccounting):
        price(event, ADD, 1e-5, "rdp")
    nested = RandomAllocationDpEvent(4, dpe.PoissonSampledDpEvent(0.1, dpe.GaussianDpEvent(1.0)))
    with pytest.raises(UnsupportedAccounting):
        price(nested, ADD, 1e-5)


def test_a_part_of_an_epoch_costs_all_of_it():
    plan = make_plan("random_allocation", rounds=8)
    assert plan.event(5) == plan.event(8) == plan.event()
    assert plan.event(4).count == 1
    with pytest.raises(ConfigError, match=r"^mechanism\.rounds=10 .* rounds_per_epoch=4"):
        make_plan("random_allocation", rounds=10)
    cohort = Cohort(
        population=50_000, users_per_client=1, clients_per_round=5000, noise_multiplier=2.0,
        rounds=98,
    )  # fmt: skip
    assert (RandomAllocation.at(cohort).rounds, RandomAllocation.at(cohort).normalizer) == (
        100,
        5e3,
    )


# ---- the sampler --------------------------------------------------------------------------------

UNITS, STEPS, EPOCHS = 2000, 5, 40


def _places(sample):
    """In which round of each epoch a unit took part, int [epochs, units]; refuses any other way."""
    world = World(np.random.default_rng(1).integers(0, 2**63, UNITS), 40)
    places = np.full((EPOCHS, UNITS), -1)
    for r in range(EPOCHS * STEPS):
        for unit in sample(r, world):
            assert places[r // STEPS, unit] == -1, "twice in one epoch"
            places[r // STEPS, unit] = r % STEPS
    assert (places >= 0).all(), "left out of an epoch"
    return places


def _place_problems(places):
    """What keeps places from being uniform and independent; false alarms 1e-6 each."""
    counts = np.bincount(places.ravel(), minlength=STEPS)
    problems = ["uniform"] if stats.chisquare(counts).pvalue < 1e-6 else []
    pairs = np.bincount((places[1:] * STEPS + places[:-1]).ravel(), minlength=STEPS**2)
    if stats.chisquare(pairs).pvalue < 1e-6:
        problems.append("epoch after epoch")
    batches = np.stack([np.bincount(epoch, minlength=STEPS) for epoch in places])
    spread = ((batches - UNITS / STEPS) ** 2).sum() / (UNITS / STEPS)
    if min(stats.chi2.cdf(spread, EPOCHS * (STEPS - 1)), stats.chi2.sf(spread, 160)) < 5e-7:
        problems.append("batches")
    return problems


@pytest.mark.statistical
def test_each_unit_is_in_one_round_of_each_epoch_and_which_is_uniform():
    plan = make_plan("random_allocation", rounds=EPOCHS * STEPS, rounds_per_epoch=STEPS)
    sampler = plan.sampler(ROOT)
    places = _places(lambda r, world: [int(unit.users[0]) for unit in sampler.sample(r, world)])
    assert _place_problems(places) == []


def _shuffled(r, world):
    """Equal batches of a shuffled list: places of units depend on each other."""
    epoch, turn = divmod(r, STEPS)
    size = UNITS // STEPS
    return np.random.default_rng(epoch).permutation(UNITS)[turn * size : (turn + 1) * size]


def _same_places(r, world):
    return np.flatnonzero(np.random.default_rng(0).integers(0, STEPS, UNITS) == r % STEPS)


def _poisson(r, world):
    return np.flatnonzero(np.random.default_rng(r).random(UNITS) < 1 / STEPS)


@pytest.mark.statistical
@pytest.mark.parametrize("planted", [_shuffled, _same_places])
def test_planted_allocations_are_found_out(planted):
    assert _place_problems(_places(planted))


@pytest.mark.statistical
def test_planted_poisson_coins_are_found_out():
    with pytest.raises(AssertionError, match=r"in one epoch|left out"):
        _places(_poisson)


def test_others_move_nobody():
    plan = make_plan("random_allocation", rounds=8)
    keys = np.random.default_rng(0).integers(0, 2**63, 50)

    def drawn(users):
        world, sampler = World(users, 40), plan.sampler(ROOT)
        return [{unit.group for unit in sampler.sample(r, world)} for r in range(8)]

    gone = int(keys[7])
    assert [there - {gone} for there in drawn(keys)] == drawn(np.delete(keys, 7))


@pytest.mark.long
@pytest.mark.statistical
def test_little_noise_over_many_rounds_has_a_finite_price():
    """Noise multiplier 0.5, one of 1,000 rounds: the price bounds what sampled sums show."""
    steps, noise = 1000, 0.5
    event = RandomAllocationDpEvent(steps, dpe.GaussianDpEvent(noise))
    epsilon = price(event, ADD, 1e-3).epsilon
    losses, _ = _sampled_losses(steps, noise, 1, samples=20_000)
    shown = np.maximum(0.0, -np.expm1(epsilon - losses)).mean()
    assert shown < 1e-3 + 5 * math.sqrt(1e-3 / 20_000)
    assert epsilon < 1.15 * float(np.quantile(losses, 1 - 1e-3))
    assert price(event, ADD, 1e-5).epsilon < math.inf


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.05, 0.2, 0.3, 0.5])
def test_with_next_to_no_noise_it_is_infinite(noise):
    """No grid of ratios holds them, and none is asked."""
    event = RandomAllocationDpEvent(10, dpe.GaussianDpEvent(noise))
    assert price(dpe.SelfComposedDpEvent(event, 5), ADD, 1e-5).epsilon == math.inf
