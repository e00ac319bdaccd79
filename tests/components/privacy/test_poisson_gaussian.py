"""DP-SGD's mechanism: published prices, the unit, and coins that are really Poisson."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe
from scipy import stats

import fedemb
from fedemb.config import RunConfig
from fedemb.errors import ConfigError, UnsupportedAccounting
from fedemb.ledger.terms import terms_of
from fedemb.privacy.accounting import price, upper_bound
from fedemb.privacy.guarantee import event_from_json, event_to_json
from fedemb.privacy.losses import DISCRETISATION, PrivacyLosses, discretisation
from fedemb.privacy.prices import epsilon_rdp, guarantee_of
from fedemb.privacy.sampling import sample
from fedemb.privacy.unit_mechanisms import (
    CappedImagePoissonConfig,
    PoissonGaussian,
    PoissonGaussianConfig,
    binomial_mixture,
)
from fedemb.reports.privacy_text import participants
from studies.shared import Cohort
from tests.kit.pipeline_runs.training_run import IMAGES, classifier_config
from tests.kit.privacy_worlds import ROOT, World, make_plan

DE = {"population": 50_000, "clients_per_round": 4096, "rounds": 875}


def plan_at(noise, images=1, unit="user", **cohort):
    numbers = DE | cohort
    return Cohort(
        users_per_client=1, noise_multiplier=noise, max_images_per_user=images, unit=unit, **numbers
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
def test_published_dp_sgd_epsilons_are_reproduced(noise, delta, cohort, pld, rdp):
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
def test_user_and_capped_image_sampling_have_the_expected_epsilon(noise, images, users, single):
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


def test_add_or_remove_needs_half_the_noise_of_replace_one():
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
            "policy": {"unit": unit, "users_lower_bound": 1000, "delta": 1e-5, "epsilon_cap": 8.0},
        }
    )


def test_guarantee_text_and_json_name_the_privacy_unit():
    image, user = plan_at(4.0, unit="image"), plan_at(4.0)
    assert "privacy for one image, if one image is" in str(guarantee_of(image, 1e-5))
    assert "one user with everything they own, if one user" in str(guarantee_of(user, 1e-5))
    assert guarantee_of(image, 1e-5).to_json()["unit"] == "image"
    assert image.digest != user.digest


def test_unit_is_fixed_for_the_policy():
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


def test_sampling_and_seed_of_a_unit_depend_on_its_key_not_its_row():
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


def test_normalizer_is_planned_not_realised():
    plan = make_plan("poisson_gaussian", units_per_round=20)
    assert plan.normalizer == 20.0
    sizes = {len(sample(plan, ROOT, r, World(range(80), 40))) for r in range(10)}
    assert len(sizes) > 1  # a realised batch would have been another divisor each time


# ---- Users protected image by image ----


ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


def _plan(**changes):
    return make_plan("capped_image_poisson", **changes)


def test_capped_image_plan_needs_max_images_per_user():
    section = CappedImagePoissonConfig(
        rounds=20, sampling_probability=0.1, images_per_round=40, noise_multiplier=3.0
    )
    with pytest.raises(ConfigError, match="pass max_images_per_user"):
        fedemb.plan(section, virtual_clients=100)
    assert fedemb.plan(section, virtual_clients=100, max_images_per_user=4).images_per_user == 4
    units = PoissonGaussianConfig(
        rounds=20, sampling_probability=0.1, units_per_round=40, noise_multiplier=3.0
    )
    image = fedemb.guarantee(fedemb.plan(units, virtual_clients=100, unit="image"), 1e-5)
    assert "for one image" in str(image)


def test_loss_grid_is_fine_for_published_settings_and_limited_in_size():
    """Points of the losses of a mixture are sought one by one."""
    assert discretisation(binomial_mixture(10, 0.08192, 10.0)) == DISCRETISATION
    assert discretisation(binomial_mixture(4, 0.08192, 2.5)) == DISCRETISATION
    for most, noise in ((20, 2.0), (60, 1.0), (500, 0.5)):
        one = binomial_mixture(most, 0.05, noise)
        moved = max(one.sensitivities) / noise
        event = dpe.SelfComposedDpEvent(one, 100)
        assert (moved**2 / 2 + 8 * moved) / discretisation(event) <= 200_001


def test_capped_image_epsilon_with_one_image_equals_poisson_gaussian():
    plans = _plan(noise_multiplier=3.0), make_plan("poisson_gaussian", noise_multiplier=3.0)
    ours, theirs = (price(plan.event(), ADD, 1e-5).epsilon for plan in plans)
    assert ours == pytest.approx(theirs, rel=2e-3)


# ---- the price against sampled sums --------------------------------------------------------------

MOST, Q_CAPPED, NOISE = 4, 0.3, 2.5


def _losses(vectors, coins, samples=200_000):
    """Losses of one round with and without a user whose images have these vectors.

    Args:
      vectors: `[images, dim]`, of length 1 at most.
      coins: draws bool `[samples, images]`.
    """
    random = np.random.default_rng(0)
    dim = vectors.shape[1]
    subsets = np.array(np.meshgrid(*[[0, 1]] * len(vectors))).reshape(len(vectors), -1).T
    means = subsets @ vectors
    chances = Q_CAPPED ** subsets.sum(1) * (1 - Q_CAPPED) ** (len(vectors) - subsets.sum(1))

    def loss(sums):
        distances = (means**2).sum(1) / 2 - sums @ means.T
        return np.log(np.exp(-distances / NOISE**2) @ chances)

    noise = NOISE * random.normal(size=(samples, dim))
    return loss(noise + coins(random, samples) @ vectors), -loss(noise)


def _own_coins(random, samples):
    return random.random((samples, MOST)) < Q_CAPPED


def _of_one_round(event):
    """On a grid of losses ten times as coarse as a guarantee's, in a tenth of the time."""
    return PrivacyLosses(event, ADD, 10 * DISCRETISATION).directions


def _problems(losses, event):
    """Where sampled losses show a larger delta than is priced; one false alarm in 10^5."""
    one = _of_one_round(event)
    found = []
    for values, priced in zip(losses, one, strict=True):
        for epsilon in (0.1, 0.5, 1.0, 1.5):
            terms = np.maximum(0.0, -np.expm1(epsilon - values))
            error = 5 * terms.std() / np.sqrt(len(terms)) + 1e-6
            if terms.mean() - error > priced.delta(epsilon):
                found.append(epsilon)
    return found


SAME = np.ones((MOST, 1))
APART = np.eye(MOST)
TURNED = np.stack([np.cos(np.arange(MOST)), np.sin(np.arange(MOST))], axis=1)


@pytest.mark.statistical
@pytest.mark.parametrize("vectors", [SAME, APART, TURNED], ids=["same", "apart", "turned"])
def test_sampled_privacy_losses_never_exceed_the_capped_image_price(vectors):
    assert _problems(_losses(vectors, _own_coins), binomial_mixture(MOST, Q_CAPPED, NOISE)) == []


@pytest.mark.statistical
def test_price_is_tight_for_equal_records():
    priced = _of_one_round(binomial_mixture(MOST, Q_CAPPED, NOISE))[0]
    terms = np.maximum(0.0, -np.expm1(0.5 - _losses(SAME, _own_coins)[0]))
    assert priced.delta(0.5) <= 1.02 * terms.mean()


# ---- the sampler ---------------------------------------------------------------------------------

USERS, ROUNDS_CAPPED = 300, 200


def _taken(draw):
    """Whether each image took part, bool `[rounds, users, images]`."""
    world = World(np.random.default_rng(1).integers(0, 2**63, USERS), 40)
    rows = {int(key): row for row, key in enumerate(world.user_keys)}
    out = np.zeros((ROUNDS_CAPPED, USERS, MOST), bool)
    for r in range(ROUNDS_CAPPED):
        for place, key in draw(r, world):
            out[r, rows[key], place] = True
    return out


def _coin_problems(taken):
    """What keeps coins from being fair and independent; false alarms 1e-6 each."""
    q = taken.mean()
    problems = [] if stats.binomtest(int(taken.sum()), taken.size, 0.25).pvalue > 1e-6 else ["q"]
    counts = np.bincount(taken.sum(2).ravel(), minlength=MOST + 1)
    wanted = stats.binom.pmf(np.arange(MOST + 1), MOST, q) * counts.sum()
    if stats.chisquare(counts, wanted).pvalue < 1e-6:
        problems.append("images of a user")
    centred = taken - q
    repeats = (centred[1:] * centred[:-1]).sum() / (q * (1 - q) * np.sqrt(centred[1:].size))
    if abs(repeats) > 5:
        problems.append("round after round")
    return problems


def _sampled(r, world):
    plan = _plan(images_per_user=MOST, rounds=ROUNDS_CAPPED)
    return [(image.grouping, image.group) for image in sample(plan, ROOT, r, world)]


@pytest.mark.statistical
def test_each_image_is_sampled_independently():
    assert _coin_problems(_taken(_sampled)) == []


def test_removing_a_user_changes_no_coin_of_other_images():
    plan = _plan(images_per_user=MOST)
    keys = np.random.default_rng(0).integers(0, 2**63, 50)

    def drawn(users):
        found = sample(plan, ROOT, 3, World(users, 40))
        return {(image.group, image.grouping) for image in found}

    gone = int(keys[7])
    assert {image for image in drawn(keys) if image[0] != gone} == drawn(np.delete(keys, 7))


# ---- forbidden combinations, and training --------------------------------------------------------


def test_capped_image_poisson_is_priced_by_pld_only():
    event = _plan(images_per_user=3).event()
    assert event_from_json(event_to_json(event)) == event
    with pytest.raises(UnsupportedAccounting):
        price(event, ADD, 1e-5, "rdp")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.unit_gradient.images_per_unit": 2}, "images_per_unit=2"),
        ({"mechanism.images_per_round": 10**6}, "images_per_round=1000000"),
        (
            {"policy.users_lower_bound": 2**28, "policy.delta": 1e-10},
            "more images than the 268435456",
        ),
        (
            {"policy.unit": "image", "data.source.columns.user_id": None},
            "protects users by a cap on their images",
        ),
    ],
)
def test_settings_that_contradict_capped_image_poisson_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        classifier_config(**IMAGES).updated(changes)
