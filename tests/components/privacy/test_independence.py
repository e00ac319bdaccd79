"""Noise and coins that depend on each other are found; sound ones raise no alarm.

Each check has a false-alarm bound of 1e-8 by Chernoff or an exact law. Every planted bug below must
make the check that is named for it fail.
"""

import math

import numpy as np
import pytest
from scipy import stats

from fedemb.engine.audit import attempt_keys
from fedemb.engine.audit import independence as module
from fedemb.engine.audit.attempt_keys import AttemptKeys
from fedemb.engine.audit.canaries import CanaryMechanism
from fedemb.engine.audit.independence import independence
from fedemb.keys import derive
from fedemb.privacy.randomness import noise, sampling
from fedemb.privacy.randomness.noise import round_tag
from tests.kit.privacy_worlds import make_plan

SECRETS = AttemptKeys(b"r" * 32, "run", 1, "inputs")
SIZE = 22_710
PLANS = {
    "groups": make_plan(rounds=30, virtual_clients=900, sampling_probability=0.1),
    "few groups": make_plan(rounds=30, virtual_clients=4, sampling_probability=0.25),
    "rare groups": make_plan(rounds=100, virtual_clients=3000, sampling_probability=0.02),
    "units": make_plan("poisson_gaussian", rounds=30),
    "users": make_plan("user_poisson", rounds=30),
    "fixed": make_plan("fixed_size", rounds=30),
    "images": make_plan("capped_image_poisson", rounds=30),
    "allocation": make_plan("random_allocation", rounds=40),
    "tree": make_plan("tree_aggregation"),
    "blt": make_plan("blt"),
    "adaptive": make_plan(rounds=30).replaced(),
    "one round": make_plan(rounds=1),
    "two rounds": make_plan(rounds=2),
    "three rounds": make_plan(rounds=3),
}


def tags_of(plan, secrets=SECRETS):
    key = secrets.key("noise")
    return [round_tag(key, r, {"update": np.array([r])}) for r in range(plan.rounds)]


def failed(plan, secrets=SECRETS, size=SIZE):
    return independence(plan, secrets, tags_of(plan, secrets), size).failed


@pytest.mark.parametrize("name", PLANS)
def test_sound_run_has_independent_noise_and_coins(name):
    found = independence(PLANS[name], SECRETS, tags_of(PLANS[name]), SIZE)
    assert found.failed == []
    assert found.rounds == PLANS[name].rounds


@pytest.mark.long
@pytest.mark.statistical
@pytest.mark.parametrize("name", ["groups", "few groups", "rare groups", "units", "fixed"])
def test_no_false_alarm_in_40_sound_runs(name):
    for number in range(40):
        secrets = AttemptKeys(derive(b"null", str(number)), "run", 1, "inputs")
        assert failed(PLANS[name], secrets, 3000) == []


# ---- planted bugs -------------------------------------------------------------------------------


def _tensor_key(patch, key_of):
    patch.setattr(module, "tensor_key", key_of)


def _no_tag(patch):
    _tensor_key(patch, lambda key, tag, name: derive(key, "normals", b"", name))


def _no_name(patch):
    _tensor_key(patch, lambda key, tag, name: derive(key, "normals", tag))


def _no_run_key(patch):
    _tensor_key(patch, lambda key, tag, name: derive(b"", "normals", tag, name))


def _tag_of_the_first_byte(patch):
    _tensor_key(patch, lambda key, tag, name: derive(key, "normals", tag[:1], name))


def _no_attempt(patch):
    patch.setattr(
        attempt_keys,
        "run_key",
        lambda root, purpose, run, attempt, inputs: derive(root, purpose, run, inputs),
    )


def _one_key_for_noise_and_coins(patch):
    def one_key(root, purpose, *names):
        return derive(root, *map(str, names))

    patch.setattr(attempt_keys, "run_key", one_key)


def _repeating_blocks(patch):
    sound = noise._keystream

    def keystream(key, domain, block, size):
        return sound(key, domain, 0, size)

    patch.setattr(noise, "_keystream", keystream)


def _shifted_rounds(patch):
    """Every round reads one keystream at another offset."""
    sound = noise.gaussian

    def gaussian(key, size):
        whole = sound(b"k" * 32, size + 2048)
        return whole[8 * (key[0] % 250) :][:size]

    patch.setattr(module, "gaussian", gaussian)


def _variables_alike(patch):
    """The noise of the second half of the weights is that of the first."""
    sound = noise.gaussian
    patch.setattr(module, "gaussian", lambda key, size: np.resize(sound(key, -(-size // 2)), size))


def _tag_of_the_first_values(patch):
    sound = noise.round_tag

    def tag(key, number, quantities):
        return sound(key, number, {name: values[:500] for name, values in quantities.items()})

    patch.setattr(module, "round_tag", tag)


def _tag_without_round(patch):
    sound = noise.round_tag
    patch.setattr(module, "round_tag", lambda key, number, quantities: sound(key, 0, quantities))


NOISE = [
    (_no_tag, "noise_rounds"),
    (_tag_of_the_first_byte, "noise_rounds"),
    (_shifted_rounds, "noise_rounds"),
    (_no_name, "noise_quantities"),
    (_no_run_key, "noise_keys"),
    (_no_attempt, "noise_keys"),
    (_one_key_for_noise_and_coins, "noise_keys"),
    (_repeating_blocks, "noise_vector"),
    (_variables_alike, "noise_vector"),
    (_tag_of_the_first_values, "noise_tags"),
    (_tag_without_round, "noise_tags"),
]


@pytest.mark.planted_bug(6)
@pytest.mark.parametrize(("plant", "check"), NOISE, ids=[p.__name__ for p, _ in NOISE])
def test_noise_that_repeats_is_found(monkeypatch, plant, check):
    plan = make_plan(rounds=300 if plant is _tag_of_the_first_byte else 30)
    plant(monkeypatch)
    assert check in failed(plan, size=3 * module._BLOCK)


def _same_clients(patch):
    def draw(self, round_index, index):
        return self.plan.sample(derive(self._coin_key, "round", "0"), round_index, index)

    patch.setattr(sampling.Sampler, "draw", draw)


def _two_rounds_take_turns(patch):
    def draw(self, round_index, index):
        return self.plan.sample(derive(self._coin_key, "round", str(round_index % 2)), 0, index)

    patch.setattr(sampling.Sampler, "draw", draw)


def _shuffled_epochs(patch):
    """Everybody once before anybody twice: never in two rounds running."""

    def draw(self, round_index, index):
        order = np.random.default_rng(round_index // 10).permutation(256)
        chosen = order[25 * (round_index % 10) :][:25]
        return [sampling.VirtualClient(0, int(g), np.array([g])) for g in chosen]

    patch.setattr(sampling.Sampler, "draw", draw)


def _one_coin_for_all(patch):
    sound = sampling.heads

    def heads(words, probability):
        return np.repeat(sound(words[:1], probability), len(words))

    patch.setattr(sampling, "heads", heads)


def _pairs_of_units(patch):
    sound = sampling.heads
    patch.setattr(
        sampling, "heads", lambda words, q: sound(np.repeat(words[::2], 2)[: len(words)], q)
    )


def _low_words(patch):
    """The coins of the low 32 bits of a word, as if there were 64."""
    sound = sampling.heads
    patch.setattr(sampling, "heads", lambda words, q: sound(words & np.uint64(0xFFFFFFFF), q))


def _coins_without_key(patch):
    def draw(self, round_index, index):
        return self.plan.sample(derive(b"", "round", str(round_index)), round_index, index)

    patch.setattr(sampling.Sampler, "draw", draw)


def _coins_from_the_noise(patch):
    """The coins' words are those of the round's noise."""

    def draw(self, round_index, index):
        tag = tags_of(self.plan)[round_index]
        key = noise.tensor_key(SECRETS.key("noise"), tag, "update")
        words = np.frombuffer(noise._keystream(key, noise._NORMAL, 0, 8 * 256), "<u8")
        chosen = np.flatnonzero(noise.heads(words, self.plan.chance))
        return [sampling.VirtualClient(0, int(g), np.array([g])) for g in chosen]

    patch.setattr(sampling.Sampler, "draw", draw)


COINS = [
    (_same_clients, "coins_rounds"),
    (_two_rounds_take_turns, "coins_rounds"),
    (_shuffled_epochs, "coins_rounds"),
    (_one_coin_for_all, "coins_units"),
    (_pairs_of_units, "coins_units"),
    (_low_words, "coins_units"),
    (_coins_without_key, "coins_keys"),
    (_coins_from_the_noise, "coins_noise"),
]


@pytest.mark.planted_bug(11)
@pytest.mark.parametrize(("plant", "check"), COINS, ids=[p.__name__ for p, _ in COINS])
def test_coins_that_depend_on_each_other_are_found(monkeypatch, plant, check):
    plan = make_plan(rounds=30, virtual_clients=256, sampling_probability=0.1)
    plant(monkeypatch)
    assert check in failed(plan)


@pytest.mark.planted_bug(11)
@pytest.mark.parametrize("name", ["units", "users", "fixed", "images", "rare groups", "few groups"])
def test_same_clients_in_every_round_are_found_under_every_sampler(monkeypatch, name):
    _same_clients(monkeypatch)
    assert "coins_rounds" in failed(PLANS[name])


@pytest.mark.planted_bug(11)
def test_same_place_in_every_epoch_is_found(monkeypatch):
    sound = sampling.AllocationSampler.draw

    def draw(self, round_index, index):
        return sound(self, round_index % self._epoch_rounds, index)

    monkeypatch.setattr(sampling.AllocationSampler, "draw", draw)
    assert failed(PLANS["allocation"]) == ["coins_epochs"]


@pytest.mark.planted_bug(6)
def test_canaries_see_noise_that_repeats_between_their_rounds(monkeypatch):
    plan = make_plan(rounds=6, noise_multiplier=0.83, virtual_clients=300)
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(
                "fedemb.privacy.randomness.keyed_noise.tensor_key",
                lambda key, tag, name: derive(key, "normals", b"", name),
            )
        canaries = CanaryMechanism(plan, b"w" * 32, "run", 1, "inputs")
        for number in range(6):
            canaries.add(number)
        assert canaries.rounds_differ is not planted


# ---- bounds -------------------------------------------------------------------------------------


def test_bound_on_a_count_is_above_the_exact_chance():
    for trials, probability in ((100, 0.01), (4000, 0.0004), (256, 0.3), (3840, 0.1)):
        law = stats.binom(trials, probability)
        counts = np.arange(trials + 1)
        refused = [not module._as_likely(int(k), trials, probability, 1e-6) for k in counts]
        assert law.pmf(counts[refused]).sum() <= 1e-6


def test_bound_on_products_of_normals_is_above_the_exact_chance():
    """At half the circle all eigenvalues are 1 or -1: a difference of two chi-squares."""
    terms, chance = 64, 1e-3
    random = np.random.default_rng(0)
    rows = random.normal(size=(200_000, terms))
    sums = np.abs(np.sum(rows * np.roll(rows, terms // 2, axis=1), axis=1))
    most = module._largest_sum(terms, chance)
    assert (sums > most).mean() <= chance
    assert most < 4 * math.sqrt(terms * math.log(2 / chance)), "the bound is not empty"
