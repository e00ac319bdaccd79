"""Receipts and canaries: sound mechanisms pass, mechanisms that are off do not.

By design a sound run fails a check with chance 2e-9 (six standard deviations). Measured here: no
false alarm in 200 sound runs of each, with fixed keys.
"""

import dataclasses
import math

import numpy as np
import pytest

from fedemb.config import ServerConfig
from fedemb.documents.mechanism_audit import CanaryFigures
from fedemb.documents.model_files import stored_move
from fedemb.engine.audit import canaries as canary_module
from fedemb.engine.audit.canaries import CanaryMechanism
from fedemb.engine.audit.receipts import NoiseReceipts
from fedemb.errors import ArtifactError
from fedemb.keys import derive
from fedemb.privacy.queries import clipped_sum
from fedemb.privacy.randomness.noise import gaussian, tensor_key
from fedemb.reports import noise_floor as floors
from fedemb.reports.noise_floor import noise_floor, why_no_floor
from tests.kit.pipeline_runs.training_run import classifier_config
from tests.kit.pipeline_runs.training_run import config as embeddings
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
        resumed.restore(parts.to_json())
        resumed.add(mean, bytes([number]))
        parts = resumed
    assert parts.to_json() == whole.to_json()


def fresh(canaries: CanaryMechanism) -> None:
    """Forgets what the canaries saw."""
    zeros = {**canaries.to_json(), "scores": [0.0] * len(canaries.to_json()["scores"])}
    canaries.restore({name: value if name == "scores" else 0 for name, value in zeros.items()})


@pytest.fixture(scope="module")
def many_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canary_module, "ROUNDS", 10**6)
        yield


@pytest.mark.statistical
@pytest.mark.usefixtures("many_rounds")
@pytest.mark.planted_bug(4)
def test_canaries_of_a_sound_mechanism_measure_the_plan_in_200_runs():
    plan = make_plan(rounds=1600, **PLAN)
    canaries = CanaryMechanism(plan, b"null" * 8, "run", 1, "inputs")
    for run in range(200):
        fresh(canaries)
        for number in range(8 * run, 8 * run + 8):
            canaries.add(number)
        assert canaries.found.rounds == 8
        assert canaries.found.off(plan) == (), run


def _scaled(sound, factor):
    return lambda *arguments: sound(*arguments) * factor


def _less_noise(patch):
    patch.setattr(clipped_sum, "grid_scale", _scaled(clipped_sum.grid_scale, 0.97))


def _no_noise(patch):
    patch.setattr(clipped_sum.KeyedNoise, "add", lambda self, name, values, scale: values)


def _longer(patch):
    import tensorflow as tf

    sound = clipped_sum.ClippedSum.record

    def record(self, clip, update):
        (integers,) = sound(self, clip, update)
        return (tf.cast(tf.cast(integers, tf.float64) * 1.41, tf.int64),)

    patch.setattr(clipped_sum.ClippedSum, "record", record)


def _oftener(patch):
    from fedemb.privacy.randomness import sampling

    sound = sampling.heads
    patch.setattr(sampling, "heads", lambda words, probability: sound(words, 2 * probability))


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (_less_noise, "noise_multiplier"),
        (_no_noise, "noise_multiplier"),
        (_longer, "contribution"),
        (_oftener, "sampling_probability"),
    ],
)
def test_canaries_see_what_is_off(monkeypatch, damage, seen):
    """The figures of a quickstart: 30 rounds, q = 0.1, noise multiplier 0.83."""
    plan = make_plan(rounds=30, **PLAN)
    damage(monkeypatch)
    canaries = CanaryMechanism(plan, b"power" * 6, "run", 1, "inputs")
    for number in range(30):
        canaries.add(number)
    assert canaries.found.off(plan) == (seen,)


@pytest.mark.statistical
def test_lower_bounds_of_a_sound_mechanism_stay_below_its_epsilon():
    from fedemb.privacy.accounting.accounting import price

    plan = make_plan(rounds=30, **PLAN)
    canaries = CanaryMechanism(plan, b"bounds" * 5, "run", 1, "inputs")
    for number in range(30):
        canaries.add(number)
    bounds = canaries.lower_bounds(1e-5)
    epsilon = price(plan.event(), plan.relation, 1e-5).epsilon
    assert 0 <= bounds.one_run <= epsilon
    assert 0 <= bounds.f_dp <= epsilon


def test_missing_figures_fit_no_plan():
    plan = make_plan(rounds=4, **PLAN)
    found = CanaryFigures(
        rounds=4, coordinates=4096, canaries=256, contributions=100,
        noise_multiplier=0.83, contribution=1.0, sampling_probability=0.1,
    )  # fmt: skip
    assert found.off(plan) == ()
    for name in ("noise_multiplier", "contribution", "sampling_probability"):
        assert found.model_copy(update={name: math.nan}).off(plan) == (name,)


SERVER = {"learning_rate": 0.7, "momentum": 0.9, "ema_decay": 0.8}


def floor_of(plan, **server):
    return noise_floor(embeddings(**{"training.server": SERVER | server}), plan)


@pytest.mark.planted_bug(4)
def test_noise_floor_lies_between_a_run_and_the_same_run_without_noise():
    """Four virtual clients: noise is 30 times as long as their sums can be."""
    plan = make_plan(rounds=30, noise_multiplier=0.83, virtual_clients=4)
    floor = floor_of(plan)
    assert floor.start_share == pytest.approx(1.0)
    weights = np.abs(floor.round_weights)
    alone = floor.unit * 0.83 * np.linalg.norm(weights) * math.sqrt(22_710)
    without = floor.unit * floor.contributions * weights.sum()
    assert without < 0.5 * floor.length(22_710)
    assert 0.7 * alone < floor.length(22_710) < alone


def test_noise_floor_takes_as_many_contributions_as_there_can_be():
    """How many units there are is private; virtual clients are as many as the plan says."""
    units = make_plan("poisson_gaussian")
    assert floor_of(units).contributions == units.most_contributions
    groups = make_plan(rounds=30, virtual_clients=1000, sampling_probability=0.01)
    assert groups.normalizer < floor_of(groups).contributions < 0.1 * groups.most_contributions


def test_noise_floor_of_long_sums_is_the_noise_of_the_last_rounds():
    """Data may then cancel whatever noise came before: the quickstart's 180 clients a round."""
    plan = make_plan(rounds=30, noise_multiplier=0.83, virtual_clients=900)
    floor = floor_of(plan)
    last = floor.unit * 0.83 * abs(floor.round_weights[-1]) * math.sqrt(22_710)
    assert 0.9 * last < floor.length(22_710) < 2 * last


def _length(floor, lean, dim, random):
    """Of weights whose sums follow `lean` of the weights so far and the most they may be."""
    total = np.zeros(dim)
    for weight in floor.round_weights:
        total += weight * lean(total, weight, floor.contributions)
        total += weight * floor.noise_multiplier * random.normal(size=dim)
    return floor.unit * np.linalg.norm(total)


def _back(total, weight, most):
    """Moves the weights back to the start as far as a sum of that length can."""
    length = np.linalg.norm(total)
    return -total / max(length, 1e-12) * np.sign(weight) * min(most, length / abs(weight))


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
@pytest.mark.parametrize(
    "plan",
    [
        make_plan(rounds=12, noise_multiplier=2.0, virtual_clients=clients)
        for clients in (4, 40, 400)
    ],
    ids=["short sums", "sums as noise", "long sums"],
)
def test_no_sums_bring_weights_below_the_noise_floor_in_200_runs(plan):
    """Not even those that lean against all noise before them."""
    floor, random, dim = floor_of(plan), np.random.default_rng(0), 2000
    lengths = [_length(floor, _back, dim, random) for _ in range(200)]
    assert min(lengths) > floor.length(dim)
    assert min(lengths) < 2.5 * floor.length(dim)  # the floor is not an empty claim


@pytest.mark.statistical
@pytest.mark.planted_bug(4)
def test_weights_without_noise_lie_below_the_floor_where_noise_is_longer_than_sums():
    plan = make_plan(rounds=12, noise_multiplier=2.0, virtual_clients=4)
    floor, random, dim = floor_of(plan), np.random.default_rng(0), 2000
    direction = random.normal(size=dim)
    direction /= np.linalg.norm(direction)
    silent = dataclasses.replace(floor, noise_multiplier=0.0)
    along = _length(silent, lambda total, weight, most: most * direction, dim, random)
    assert along < floor.length(dim)


def test_noise_floor_is_told_by_the_rule_that_trains():
    """Weights of start and means against the server's own step, decay, warm-up and average."""
    from fedemb.engine.server import initial_state, released_weights, server_step

    server = ServerConfig(
        learning_rate=0.3, momentum=0.7, nesterov=True, weight_decay=0.05, schedule="cosine",
        warmup_rounds=3, ema_decay=0.6,
    )  # fmt: skip
    random = np.random.default_rng(0)
    start, means = random.normal(size=4), random.normal(size=(9, 4))
    state = initial_state(server, start.astype(np.float32))
    for mean in means:
        state = server_step(server, state, mean.astype(np.float32), rounds=9)
    share, weights = floors._weights(server, 9)
    np.testing.assert_allclose(
        released_weights(server, state), share * start + weights @ means, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("plan", "config", "words"),
    [
        (make_plan(), embeddings(**{"training.server.optimizer": "adam"}), "adam is not linear"),
        (make_plan(), embeddings(**{"training.server.optimizer": "lamb"}), "lamb is not linear"),
        (make_plan("tree_aggregation"), embeddings(), "share noise"),
        (make_plan("least_squares"), classifier_config(), "solved"),
    ],
)
def test_where_no_floor_follows_from_the_plan_the_reason_is_told(plan, config, words):
    assert noise_floor(config, plan) is None
    assert words in why_no_floor(config, plan)


def _saved(folder, name, **fields):
    from fedemb.config import ModelConfig
    from fedemb.engine import build_backbone, save_backbone

    model = ModelConfig(backbone=name, image_size=8, embedding_dim=4, **fields)
    path = folder / f"{name}{len(fields)}.keras"
    return path, save_backbone(build_backbone(model, 0), path)


@pytest.mark.parametrize(
    ("name", "standardised"), [("resnet8", False), ("resnet8_ws", True), ("wrn_16_4", True)]
)
def test_where_the_start_computes_with_other_kernels_no_floor_is_asked_and_said(
    tmp_path, name, standardised
):
    """The page takes its text from the function the gate asks."""
    start, _ = _saved(tmp_path, name)
    reason = why_no_floor(embeddings(), make_plan(), start)
    assert (reason is not None and "standardise" in reason) == standardised
    assert (noise_floor(embeddings(), make_plan(), start) is None) == standardised


def test_model_with_other_tensors_than_its_start_has_moved_nobody_knows_how_far(tmp_path):
    start, released = _saved(tmp_path, "tiny"), _saved(tmp_path, "lenet")
    assert stored_move(start[0], start[0], 1.0, (start[1], start[1])) == (0.0, 0)
    with pytest.raises(ArtifactError, match="differ from those of the public backbone"):
        stored_move(start[0], released[0], 1.0, (start[1], released[1]))


def test_noise_of_a_classifier_is_pulled_back_by_its_loss_and_not_below_its_floor():
    """Sound training, and nearer its start than its noise; units are not counted in public."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 400)
    features = 0.5 * random.normal(size=(10, 64))[labels] + random.normal(size=(400, 64))
    features = np.c_[features / np.linalg.norm(features, axis=1, keepdims=True), np.ones(400)]
    head, rate = np.zeros((65, 10)), 8.0
    noise = 2 / np.sqrt(650)
    for _ in range(150):
        logits = features @ head
        shares = np.exp(logits - logits.max(1, keepdims=True))
        errors = np.eye(10)[labels] - shares / shares.sum(1, keepdims=True)
        norms = np.linalg.norm(features, axis=1) * np.linalg.norm(errors, axis=1)
        clipped = features.T @ (errors / np.maximum(1.0, norms)[:, None]) / 400
        head = head + rate * (clipped + noise * random.normal(size=head.shape))
    assert np.linalg.norm(head) < 0.98 * rate * noise * np.sqrt(150 * 650)
    plan = make_plan("poisson_gaussian", rounds=150, noise_multiplier=400 * noise)
    plan = plan.replaced(units_per_round=400)
    config = classifier_config(**{"training.server": {"learning_rate": rate}})
    assert 0 < noise_floor(config, plan).length(650) < np.linalg.norm(head)
