"""DP-SGD's mechanism: published prices, the unit, and coins that are really Poisson."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event as dpe
from scipy import stats

from fedemb.config import RunConfig
from fedemb.ledger.terms import terms_of
from fedemb.privacy.accounting import price, upper_bound
from fedemb.privacy.prices import epsilon_rdp, guarantee_of
from fedemb.privacy.sampling import sample
from fedemb.privacy.unit_mechanisms import PoissonGaussian, binomial_mixture
from fedemb.reports.privacy_words import participants
from studies.shared import Cohort
from tests.kit.privacy_worlds import ROOT, World, make_plan

DE = {"population": 50_000, "clients_per_round": 4096, "rounds": 875}


def plan_at(noise, images=1, unit="user", **cohort):
    numbers = DE | cohort
    return Cohort(
        users_per_client=1,
        noise_multiplier=noise,
        max_images_per_user=images,
        unit=unit,
        **numbers,
    ).plan(PoissonGaussian)


# ---- prices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "delta", "cohort", "pld", "rdp"),
    [
        (10.0, 1e-5, {}, 0.904, 0.988),  # De et al., CIFAR-10
        (3.0, 1e-5, {"rounds": 2500}, 6.58, 7.10),  # TAN
        (  # Kurakin et al., ImageNet: q = .0512
            1.3127,
            1e-6,
            {"population": 1_280_000, "clients_per_round": 65_536, "rounds": 1368},
            9.29,
            9.97,
        ),
    ],
)
def test_published_prices(noise, delta, cohort, pld, rdp):
    plan = plan_at(noise, **cohort)
    assert guarantee_of(plan, delta).epsilon == pytest.approx(pld, rel=5e-3)
    assert epsilon_rdp(plan, delta) == pytest.approx(rdp, rel=5e-3)


@pytest.mark.parametrize(("noise", "target"), [(9.12, 1.0), (3.49, 3.0), (1.641, 8.0)])
def test_published_noise_suffices_and_one_percent_less_does_not(noise, target):
    assert guarantee_of(plan_at(noise), 1e-5).epsilon <= target
    assert guarantee_of(plan_at(0.99 * noise), 1e-5).epsilon > target


@pytest.mark.parametrize(("noise", "target"), [(18.08, 1.0), (6.735, 3.0), (2.90, 8.0)])
def test_published_noise_of_whole_groups_suffices_and_one_percent_less_does_not(noise, target):
    def at(noise):
        return make_plan(sampling_probability=0.08192, rounds=875, noise_multiplier=noise)

    assert guarantee_of(at(noise), 1e-5).epsilon <= target
    assert guarantee_of(at(0.99 * noise), 1e-5).epsilon > target


@pytest.mark.parametrize(
    ("noise", "images", "users", "single"),
    [(2.5, 4, 4.52, 4.26), (5.0, 4, 1.97, 1.93), (1.0, 10, 18.2, 12.8), (2.0, 10, 6.06, 5.50)],
)
def test_both_ways_of_sampling_users_are_priced(noise, images, users, single):
    """Whole users, and images with a cap per user, at the same noise on the mean."""
    plan = plan_at(noise, images)
    assert guarantee_of(plan, 1e-5).epsilon == pytest.approx(users, rel=5e-3)
    found = upper_bound(
        dpe.SelfComposedDpEvent(
            binomial_mixture(images, plan.sampling_probability, noise * images), plan.rounds
        ),
        plan.relation,
        1e-5,
    )
    assert found == pytest.approx(single, rel=5e-3)


def test_full_batch_is_exact_gaussian_composition():
    plan = plan_at(20.0, clients_per_round=50_000, rounds=100)
    assert plan.round_event == dpe.GaussianDpEvent(20.0)
    one = dpe.GaussianDpEvent(20.0 / math.sqrt(100))
    added = plan.relation
    assert guarantee_of(plan, 1e-5).epsilon == pytest.approx(
        price(one, added, 1e-5).epsilon, rel=2e-3
    )
    assert "full batch" in participants(plan)
    assert [c.group for c in sample(plan, ROOT, 0, World(range(9), 50_000))] == [*range(9)]


def test_one_record_costs_half_the_noise_of_a_replaced_one():
    """Slots under REPLACE_ONE would need about twice the noise (docs/privacy/sensitivity.md)."""
    group = make_plan(sampling_probability=0.08192, rounds=875, noise_multiplier=18.08)
    assert guarantee_of(group, 1e-5).epsilon == pytest.approx(
        guarantee_of(plan_at(9.12), 1e-5).epsilon, rel=0.03
    )


# ---- the unit -----------------------------------------------------------------------------------


def settings(unit="user", user_id="user_id", kind="poisson_gaussian"):
    mechanism = {"kind": kind, "rounds": 5, "noise_multiplier": 4.0, "sampling_probability": 0.1}
    if kind == "poisson_gaussian":
        mechanism["units_per_round"] = 100
    return RunConfig.model_validate(
        {
            "purpose": "simulation",
            "data": {"source": {"uri": "x.parquet", "columns": {"user_id": user_id}}},
            "partition": {"virtual_clients": 1},
            "mechanism": mechanism,
            "policy": {
                "unit": unit,
                "users_lower_bound": 1000,
                "delta": 1e-5,
                "epsilon_cap": 8.0,
            },
        }
    )


def test_the_unit_is_named_where_a_reader_looks():
    image, user = plan_at(4.0, unit="image"), plan_at(4.0)
    assert "privacy for one image, if one image is" in str(guarantee_of(image, 1e-5))
    assert "one user with everything they own, if one user" in str(guarantee_of(user, 1e-5))
    assert guarantee_of(image, 1e-5).to_json()["unit"] == "image"
    assert image.digest != user.digest


def test_a_policy_keeps_its_unit_for_life():
    ours = terms_of(settings(), None)
    (first, *_) = ours.differences(terms_of(settings("image", None), None))
    differences = ours.differences(terms_of(settings("image", None), None))
    assert any("policy.unit is 'image' where the policy has 'user'" in text for text in differences)
    assert first


def test_a_unit_that_the_data_or_mechanism_cannot_have_is_refused():
    assert settings("image", None).policy.unit == "image"
    with pytest.raises(ValueError, match="user_id: null with unit: image"):
        settings("image")
    with pytest.raises(ValueError, match="user_id: null with unit: image"):
        settings("user", None)
    with pytest.raises(ValueError, match=r"does not support policy\.unit=image"):
        settings("image", None, "group_poisson_gaussian")


# ---- coins --------------------------------------------------------------------------------------

UNITS, ROUNDS, Q = 400, 300, 0.1


def participation(sample):
    """Who took part, bool [rounds, units]."""
    world = World(np.random.default_rng(1).integers(0, 2**63, UNITS), 40)
    out = np.zeros((ROUNDS, UNITS), bool)
    for r in range(ROUNDS):
        for row in sample(r, world):
            out[r, row] = True
    return out


def coin_problems(taken):
    """What keeps participation from being independent coins of chance Q.

    Each test has a false-alarm rate of 1e-6; keys are fixed.
    """
    problems = []
    if stats.binomtest(int(taken.sum()), taken.size, Q).pvalue < 1e-6:
        problems.append("frequency")
    spread = ((taken.sum(0) - ROUNDS * Q) ** 2).sum() / (ROUNDS * Q * (1 - Q))
    batch = ((taken.sum(1) - UNITS * Q) ** 2).sum() / (UNITS * Q * (1 - Q))
    for name, value, freedom in (("per unit", spread, UNITS), ("per round", batch, ROUNDS)):
        if min(stats.chi2.cdf(value, freedom), stats.chi2.sf(value, freedom)) < 5e-7:
            problems.append(name)
    centred = (taken - Q) / math.sqrt(Q * (1 - Q))
    repeats = (centred[1:] * centred[:-1]).sum() / math.sqrt(UNITS * (ROUNDS - 1))
    if abs(repeats) > 4.9:
        problems.append("round after round")
    return problems


def rows(plan):
    return lambda r, world: [int(unit.users[0]) for unit in sample(plan, ROOT, r, world)]


@pytest.mark.statistical
def test_coins_are_independent_and_of_the_planned_chance():
    plan = make_plan("poisson_gaussian", rounds=ROUNDS, sampling_probability=Q)
    assert coin_problems(participation(rows(plan))) == []


def _shuffled(r, world):
    """Epochs of a shuffled list, cut into batches: what most loaders do."""
    size = round(UNITS * Q)
    epoch, turn = divmod(r * size, UNITS)
    return np.random.default_rng(epoch).permutation(UNITS)[turn : turn + size]


def _fixed(r, world):
    return np.random.default_rng(r).permutation(UNITS)[: round(UNITS * Q)]


def _per_loader(r, world):
    """q = 1 / len(loader): the loader drops its last batch, and the chance is another."""
    return np.flatnonzero(np.random.default_rng(r).random(UNITS) < 1 / (1 / Q - 1))


def _same_coins(r, world):
    return np.flatnonzero(np.random.default_rng(r // 2).random(UNITS) < Q)


@pytest.mark.statistical
@pytest.mark.parametrize("planted", [_shuffled, _fixed, _per_loader, _same_coins])
def test_planted_samplers_are_found_out(planted):
    assert coin_problems(participation(planted))


def test_a_unit_is_known_by_its_hash_and_not_by_its_place():
    """Other users change neither coin nor seed of a user; the planted row number does."""
    plan = make_plan("poisson_gaussian", sampling_probability=0.5)
    keys = np.random.default_rng(0).integers(0, 2**63, 50)
    fewer = np.delete(keys, 7)

    def drawn(users, name):
        world = World(users, 40)
        return [{name(unit, world) for unit in sample(plan, ROOT, r, world)} for r in range(20)]

    def by_hash(unit, world):
        assert unit.group == int(world.user_keys[unit.users[0]])
        return unit.group

    gone = int(keys[7])
    with_all, without = drawn(keys, by_hash), drawn(fewer, by_hash)
    assert [there - {gone} for there in with_all] == without
    by_row = [drawn(users, lambda unit, _: int(unit.users[0])) for users in (keys, fewer)]
    assert by_row[0] != by_row[1]  # what a seed by place would have seen


def test_the_divisor_is_planned_and_never_who_showed_up():
    plan = make_plan("poisson_gaussian", units_per_round=20)
    assert plan.normalizer == 20.0
    sizes = {len(sample(plan, ROOT, r, World(range(80), 40))) for r in range(10)}
    assert len(sizes) > 1  # a realised batch would have been another divisor each time
