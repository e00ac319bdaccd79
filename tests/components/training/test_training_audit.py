"""The audit of a training: a sound one passes, and each way of not running what was priced fails.

The ways are those of a careless developer, put into the product while a real training runs.
"""

import shutil

import numpy as np
import pytest
import tensorflow as tf

from fedemb.documents.audit import MechanismAudit
from fedemb.privacy import noise, running, sampling
from fedemb.privacy.registry import plan_mechanism
from fedemb.privacy.running import Mechanism, RoundOutput
from fedemb.steps import train_dp_fedemb as embeddings
from fedemb.steps import train_dp_sgd as classifier
from fedemb.training import audit as round_replay
from fedemb.training import trainer, working_state
from fedemb.training.tensorflow_clients import ParallelRounds
from tests.kit.pipeline_runs.training_run import (
    ReadyRun,
    Unaudited,
    classifier_config,
    config,
    covariance_config,
    prepare,
)

HEAD = {
    "model.trainable": "head",
    "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
}
IMAGES = {
    "mechanism": {
        "kind": "capped_image_poisson",
        "rounds": 3,
        "noise_multiplier": 3.0,
        "sampling_probability": 0.3,
        "images_per_round": 90,
    },
    "training.unit_gradient": {"images_per_unit": 1, "microbatch": 4},
    "partition.max_images_per_user": 4,
    "policy.composition": "planned",
}
TURNS = {"clients_per_round": 3}


def mechanism(**fields):
    return {"mechanism": {"rounds": 6, "noise_multiplier": 1.0, **fields}}


CLIPPED = {"mechanism.l2_norm_clip": 0.01}  # every record, so that a longer clip shows in each
TRAINERS = {"train_dp_fedemb": config(), "train_dp_sgd": classifier_config(**CLIPPED)}
SOUND = {
    **TRAINERS,
    "averaged": config(**{"training.server": {"ema_decay": 0.8, "momentum": 0.9}}),
    "tree": config(**mechanism(kind="tree_aggregation", **TURNS)),
    "images": classifier_config(
        **{
            "policy.unit": "image",
            "data.source.columns.user_id": None,
            "training.unit_gradient.images_per_unit": 1,
        }
    ),
    "images of users": classifier_config(**IMAGES),
    "images of users, head": classifier_config(**IMAGES, **{"model.trainable": "head"}),
    "head": classifier_config(**HEAD),
    "least squares": classifier_config(
        **HEAD, **mechanism(kind="least_squares", rounds=1, units_per_round=12)
    ),
    "covariance": covariance_config(),
}
"""Settings of every mechanism, and of every way to train."""
QUICK = (*TRAINERS, "tree", "images of users, head")
"""One each of: users in groups, units, noise that rounds share, coins for images."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Makes a run of some settings ready, once."""
    ready = {}

    def of(name):
        if name not in ready:
            root = tmp_path_factory.mktemp("audited") / "run"
            ready[name] = prepare(root, SOUND[name])
        return ready[name]

    return of


@pytest.fixture
def fresh(prepared, tmp_path):
    """A copy of a ready run."""

    def of(name, copy="run"):
        source = prepared(name)
        shutil.copytree(source.root, tmp_path / copy)
        return ReadyRun(tmp_path / copy, source.config)

    return of


def evidence_of(run):
    return MechanismAudit.model_validate(run.train()["mechanism_audit"])


def failed(run):
    card, plan = run.train(), plan_mechanism(run.config)
    return set(MechanismAudit.model_validate(card["mechanism_audit"]).failed(plan))


@pytest.mark.planted_bug(4)
@pytest.mark.mutation
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in SOUND]
)
def test_sound_training_passes(fresh, name):
    assert failed(fresh(name)) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["tree"])
def test_training_killed_between_its_evidence_and_its_checkpoint_passes(fresh, name):
    """The checkpoint is a round older than the evidence, which resumes from the round's record."""
    run, saves = fresh(name), []
    save = working_state.save_checkpoint

    def killed(*progress):
        saves.append(progress)
        if len(saves) == 3:
            raise KeyboardInterrupt
        save(*progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(working_state, "save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert failed(run) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_bits_of_a_training_do_not_depend_on_the_audit(fresh, name):
    blind, seen = fresh(name, "blind"), fresh(name, "seen")
    step = {"train_dp_fedemb": embeddings, "train_dp_sgd": classifier}[name]

    key = b"k" * 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "RoundAudit", Unaudited)
        step.run(blind.context(), root_key=key)
    step.run(seen.context(), root_key=key)
    files = [(r.root / "model" / "backbone.keras").read_bytes() for r in (blind, seen)]
    lines = [(r.root / "model" / "rounds.jsonl").read_bytes() for r in (blind, seen)]
    assert lines[0] == lines[1]
    assert _weights(files[0]) == _weights(files[1])


def _weights(data):
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("model.weights.h5")


def _raw_mean(mechanism, state):
    clip = mechanism.plan.l2_norm_clip
    total = np.asarray(state, np.float64) * clip / 2.0**mechanism.plan.grid_bits
    return (total / mechanism.plan.normalizer).astype(np.float32)


def noise_forgotten_in_the_query(patch):
    patch.setattr(running, "add_rounded_noise", lambda values, key, scale: values)


def _normals_scaled(patch, factor):
    """In the generator that trainer and audit share."""
    sound = noise._box_muller

    def scaled(key, block, out):
        sound(key, block, out)
        out *= factor(out.size)

    patch.setattr(noise, "_box_muller", scaled)


def noise_two_percent_too_small(patch):
    _normals_scaled(patch, lambda size: 0.98)


def noise_left_out_of_the_last_weights(patch):
    _normals_scaled(patch, lambda size: np.where(np.arange(size) < 0.6 * size, 1.0, 1e-3))


def mean_taken_before_the_noise(patch):
    sound = Mechanism.aggregate

    def aggregate(self, index, state):
        mean = _raw_mean(self, state)
        out = sound(self, index, state)
        return RoundOutput(mean, out.event, running.hashlib.sha256(mean.tobytes()).hexdigest())

    patch.setattr(Mechanism, "aggregate", aggregate)


def trainer_steps_with_the_raw_mean(patch):
    """What is committed is noised; what trains is not."""
    sound, raw = Mechanism.aggregate, []

    def aggregate(self, index, state):
        raw.append(_raw_mean(self, state))
        return sound(self, index, state)

    class SteppingRaw:
        def __init__(self, function):
            self._function = function

        def __getattr__(self, name):
            return getattr(self._function, name)

        def advance(self, server, state, mean):
            return self._function.advance(server, state, raw[-1])

    rounds = trainer.run_rounds
    patch.setattr(Mechanism, "aggregate", aggregate)
    patch.setattr(
        trainer,
        "run_rounds",
        lambda function, *rest, **more: rounds(SteppingRaw(function), *rest, **more),
    )


def mean_shrunk_by_its_raw_norm(patch):
    sound = Mechanism.aggregate

    def aggregate(self, index, state):
        shrink = np.float32(1 / (1 + np.linalg.norm(_raw_mean(self, state))))
        out = sound(self, index, state)
        mean = out.mean * shrink
        return RoundOutput(mean, out.event, running.hashlib.sha256(mean.tobytes()).hexdigest())

    patch.setattr(Mechanism, "aggregate", aggregate)


def public_digest_of_the_raw_sum(patch):
    sound = Mechanism.aggregate

    def aggregate(self, index, state):
        raw = _raw_mean(self, state)
        out = sound(self, index, state)
        return RoundOutput(out.mean, out.event, running.hashlib.sha256(raw.tobytes()).hexdigest())

    patch.setattr(Mechanism, "aggregate", aggregate)


def clip_a_tenth_too_long(patch):
    sound = Mechanism.record

    def record(self, update):
        return tf.cast(tf.cast(sound(self, update), tf.float64) * 1.1, tf.int64)

    patch.setattr(Mechanism, "record", record)


def clients_cut_to_the_size_of_the_smallest(patch):
    """One user moves everybody's contribution."""
    sound = ParallelRounds.slabs

    def slabs(self, clients, index):
        clients = [client for client in clients if len(client.labels)]
        least = sum(len(client.labels) for client in clients) // 4
        for client in clients:
            client.images[:, 0, 0, 0] = least
        return sound(self, clients, index)

    patch.setattr(ParallelRounds, "slabs", slabs)


def coins_that_know_how_many_users_there_are(patch):
    groups, units = sampling.sample_groups, sampling.sample_units

    def sample(plan, probability, key, index, users):
        return groups(plan, probability, key[:-1] + bytes([users.user_count % 256]), index, users)

    def alone(probability, key, index):
        return units(probability, key[:-1] + bytes([len(index.user_keys) % 256]), index)

    patch.setattr(sampling, "sample_units", alone)
    patch.setattr(sampling, "sample_groups", sample)


@pytest.mark.planted_bug(4)
@pytest.mark.mutation
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (noise_forgotten_in_the_query, "noise_receipt_failed"),
        (noise_two_percent_too_small, "replay_differs"),
        (noise_left_out_of_the_last_weights, "noise_receipt_failed"),
        (mean_taken_before_the_noise, "noise_receipt_failed"),
        (trainer_steps_with_the_raw_mean, "fold_differs"),
        (mean_shrunk_by_its_raw_norm, "noise_receipt_failed"),
        (public_digest_of_the_raw_sum, "fold_differs"),
        (clip_a_tenth_too_long, "replay_differs"),
        (clients_cut_to_the_size_of_the_smallest, "replay_differs"),
        (coins_that_know_how_many_users_there_are, "replay_differs"),
    ],
)
@pytest.mark.parametrize(
    "name", ["train_dp_fedemb", pytest.param("train_dp_sgd", marks=pytest.mark.slow)]
)
def test_training_that_is_not_what_was_priced_fails_its_audit(
    fresh, monkeypatch, damage, code, name
):
    damage(monkeypatch)
    assert code in failed(fresh(name))


@pytest.mark.planted_bug(4)
@pytest.mark.mutation
@pytest.mark.parametrize("name", ["head", pytest.param("least squares", marks=pytest.mark.slow)])
def test_noise_is_missed_also_where_a_slope_says_little(fresh, monkeypatch, name):
    """A head of few weights, or one round of everybody: the sum is far longer than its noise."""
    noise_forgotten_in_the_query(monkeypatch)
    assert "noise" in evidence_of(fresh(name)).replay.failed


def coins_of_images_by_place_in_the_list(patch):
    sound = sampling.user_words

    def words(key, users):
        return sound(key, np.arange(len(users), dtype=np.uint64))

    patch.setattr(sampling, "user_words", words)


def images_darken_with_their_number(patch):
    """How dark an image is follows from how many there are: one user moves all others."""
    sound = ParallelRounds.slabs

    def slabs(self, clients, index):
        clients = [client for client in clients if len(client.labels)]
        for client in clients:
            client.images[:] //= 1 + len(clients) % 7
        return sound(self, clients, index)

    patch.setattr(ParallelRounds, "slabs", slabs)


def only_one_image_of_a_user_is_taken_out(patch):
    """The neighbour that a price for images alone would allow."""
    sound = round_replay._less

    def less(client, removed):
        return client if client.grouping else sound(client, removed)

    patch.setattr(round_replay, "_less", less)


@pytest.mark.planted_bug(8)
@pytest.mark.mutation
@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (coins_of_images_by_place_in_the_list, "coins"),
        pytest.param(images_darken_with_their_number, "sum", marks=pytest.mark.slow),
        pytest.param(clip_a_tenth_too_long, "clip", marks=pytest.mark.slow),
        (only_one_image_of_a_user_is_taken_out, "coins"),
    ],
)
def test_round_is_run_again_without_all_images_of_a_user(fresh, monkeypatch, damage, seen):
    damage(monkeypatch)
    assert seen in evidence_of(fresh("images of users")).replay.failed


@pytest.mark.planted_bug(8)
@pytest.mark.mutation
def test_image_that_takes_part_twice_is_seen_by_the_replay(fresh, monkeypatch):
    sound = sampling.sample_images

    def twice(*arguments):
        return [image for image in sound(*arguments) for _ in range(2)]

    monkeypatch.setattr(sampling, "sample_images", twice)
    assert "coins" in evidence_of(fresh("images of users")).replay.failed


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["train_dp_fedemb", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tree", "head"))],
)
def test_trainer_killed_and_resumed_has_the_same_evidence(fresh, monkeypatch, name):
    """The figures of the rounds before a kill are kept; none is checked twice."""
    run, killed = fresh(name), fresh(name, "killed")
    whole, rounds = evidence_of(run), run.config.mechanism.rounds
    sound = working_state.save_checkpoint

    def save(store, progress):
        if progress.state.rounds == rounds - 1:
            raise KeyboardInterrupt
        sound(store, progress)

    with monkeypatch.context() as patch:
        patch.setattr(working_state, "save_checkpoint", save)
        with pytest.raises(KeyboardInterrupt):
            killed.train()
    found = evidence_of(killed)
    assert found.failed(plan_mechanism(run.config)) == {}
    assert found == whole
