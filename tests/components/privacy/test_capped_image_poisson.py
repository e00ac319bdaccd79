"""Users protected image by image: the price against Monte Carlo, and coins of each image's own."""

import json

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting import dp_event as dpe
from scipy import stats

import fedemb
from fedemb.errors import ConfigError, UnsupportedAccounting
from fedemb.privacy.accounting import price
from fedemb.privacy.guarantee import event_from_json, event_to_json
from fedemb.privacy.losses import DISCRETISATION, PrivacyLosses, discretisation
from fedemb.privacy.sampling import sample
from fedemb.privacy.unit_mechanisms import (
    CappedImagePoissonConfig,
    PoissonGaussianConfig,
    binomial_mixture,
)
from tests.kit.pipeline_runs.training_run import classifier_config, prepare
from tests.kit.privacy_worlds import ROOT, World, make_plan

ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


def _plan(**changes):
    return make_plan("capped_image_poisson", **changes)


def test_whoever_plans_it_says_how_many_images_one_user_may_have():
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


def test_grid_is_fine_for_published_settings_and_never_endless():
    """Points of the losses of a mixture are sought one by one."""
    assert discretisation(binomial_mixture(10, 0.08192, 10.0)) == DISCRETISATION
    assert discretisation(binomial_mixture(4, 0.08192, 2.5)) == DISCRETISATION
    for most, noise in ((20, 2.0), (60, 1.0), (500, 0.5)):
        one = binomial_mixture(most, 0.05, noise)
        moved = max(one.sensitivities) / noise
        event = dpe.SelfComposedDpEvent(one, 100)
        assert (moved**2 / 2 + 8 * moved) / discretisation(event) <= 200_001


def test_one_image_of_a_user_costs_what_a_unit_alone_does():
    plans = _plan(noise_multiplier=3.0), make_plan("poisson_gaussian", noise_multiplier=3.0)
    ours, theirs = (price(plan.event(), ADD, 1e-5).epsilon for plan in plans)
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(
    ("most", "noise", "epsilon"), [(4, 10.0, 4.26), (4, 20.0, 1.93), (10, 10.0, 12.8)]
)
def test_figures_of_the_specification(most, noise, epsilon):
    """docs/explanation/dp_sgd.md: q = 4096 / 50,000, 875 rounds."""
    event = dpe.SelfComposedDpEvent(binomial_mixture(most, 4096 / 50_000, noise), 875)
    assert price(event, ADD, 1e-5).epsilon == pytest.approx(epsilon, rel=5e-3)


# ---- the price against sampled sums --------------------------------------------------------------

MOST, Q, NOISE = 4, 0.3, 2.5


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
    chances = Q ** subsets.sum(1) * (1 - Q) ** (len(vectors) - subsets.sum(1))

    def loss(sums):
        distances = (means**2).sum(1) / 2 - sums @ means.T
        return np.log(np.exp(-distances / NOISE**2) @ chances)

    noise = NOISE * random.normal(size=(samples, dim))
    return loss(noise + coins(random, samples) @ vectors), -loss(noise)


def _own_coins(random, samples):
    return random.random((samples, MOST)) < Q


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
def test_no_directions_of_a_users_images_cost_more_than_is_priced(vectors):
    assert _problems(_losses(vectors, _own_coins), binomial_mixture(MOST, Q, NOISE)) == []


@pytest.mark.statistical
def test_price_is_tight_where_all_images_say_the_same():
    priced = _of_one_round(binomial_mixture(MOST, Q, NOISE))[0]
    terms = np.maximum(0.0, -np.expm1(0.5 - _losses(SAME, _own_coins)[0]))
    assert priced.delta(0.5) <= 1.02 * terms.mean()


@pytest.mark.statistical
@pytest.mark.parametrize(
    "planted",
    [
        dpe.PoissonSampledDpEvent(Q, dpe.GaussianDpEvent(NOISE)),
        pytest.param(binomial_mixture(MOST - 1, Q, NOISE), marks=pytest.mark.slow),
        dpe.PoissonSampledDpEvent(1 - (1 - Q) ** MOST, dpe.GaussianDpEvent(NOISE)),
    ],
    ids=["as one unit", "cap off by one", "present once at most"],
)
def test_planted_prices_are_found_out(planted):
    assert _problems(_losses(SAME, _own_coins), planted)


# ---- the sampler ---------------------------------------------------------------------------------

USERS, ROUNDS = 300, 200


def _taken(draw):
    """Whether each image took part, bool `[rounds, users, images]`."""
    world = World(np.random.default_rng(1).integers(0, 2**63, USERS), 40)
    rows = {int(key): row for row, key in enumerate(world.user_keys)}
    out = np.zeros((ROUNDS, USERS, MOST), bool)
    for r in range(ROUNDS):
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
    plan = _plan(images_per_user=MOST, rounds=ROUNDS)
    return [(image.grouping, image.group) for image in sample(plan, ROOT, r, world)]


@pytest.mark.statistical
def test_each_image_has_a_coin_of_its_own():
    assert _coin_problems(_taken(_sampled)) == []


def _one_coin_a_user(r, world):
    drawn = np.random.default_rng(r).random(USERS) < 0.25
    return [(place, int(key)) for key in world.user_keys[drawn] for place in range(MOST)]


def _same_coins_each_round(r, world):
    return _sampled(0, world)


@pytest.mark.statistical
@pytest.mark.parametrize("planted", [_one_coin_a_user, _same_coins_each_round])
def test_planted_coins_are_found_out(planted):
    assert _coin_problems(_taken(planted))


def test_others_move_no_image():
    plan = _plan(images_per_user=MOST)
    keys = np.random.default_rng(0).integers(0, 2**63, 50)

    def drawn(users):
        found = sample(plan, ROOT, 3, World(users, 40))
        return {(image.group, image.grouping) for image in found}

    gone = int(keys[7])
    assert {image for image in drawn(keys) if image[0] != gone} == drawn(np.delete(keys, 7))


# ---- forbidden combinations, and training --------------------------------------------------------

MECHANISM = {
    "kind": "capped_image_poisson",
    "rounds": 2,
    "noise_multiplier": 12.0,
    "sampling_probability": 0.3,
    "images_per_round": 90,
}
UNIT = {"images_per_unit": 1, "microbatch": 4}


def test_it_has_no_price_but_the_mixtures():
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
def test_what_contradicts_it_is_refused(changes, words):
    settings = {"mechanism": MECHANISM, "training.unit_gradient": UNIT}
    base = classifier_config(**settings)
    with pytest.raises(ValueError, match=words):
        base.updated(changes)


@pytest.mark.long
@pytest.mark.parametrize("trainable", ["all", "head"])
def test_it_trains_on_one_image_of_a_user_at_a_time(tmp_path, trainable, monkeypatch):
    from fedemb.training.trainer import ClientLoader

    seen = []
    load = ClientLoader.load

    def looking(self, client):
        found = load(self, client)
        seen.append((client.group, client.grouping, len(found.labels)))
        return found

    monkeypatch.setattr(ClientLoader, "load", looking)
    changes = {"mechanism": MECHANISM, "training.unit_gradient": UNIT}
    composed = {"policy.composition": "planned", "partition.max_images_per_user": 4}
    settings = classifier_config(**changes, **composed, **{"model.trainable": trainable})
    run = prepare(tmp_path / "run", settings, users=101)
    assert run.train()["rounds_run"] == 2
    counts = {(place, count) for _, place, count in seen}
    # Users have three images; who is taken out where a round is run again has none.
    assert counts - {(place, 0) for place in range(3)} == {(0, 1), (1, 1), (2, 1), (3, 0)}
    (line, _) = (run.root / "model" / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["event"]["type"] == "mixture_of_gaussians"
