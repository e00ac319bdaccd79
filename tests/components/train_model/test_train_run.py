"""The training step from reservation to commit, killed and resumed at every act that counts."""

import io
import json
import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.data.client_data import UserStore, VerifiedFolder
from fedemb.documents.evidence import read_rounds
from fedemb.documents.model import ModelCard
from fedemb.documents.plan import read_plan
from fedemb.errors import ConfigError, Interrupted, LedgerError, PlanMismatch, Refused
from fedemb.foundation.canonical_json import file_digest, tree_digests
from fedemb.foundation.document import encode, read
from fedemb.keys.trust import Signer, sign_document
from fedemb.ledger import read_reservation, rotate_keys
from fedemb.models.backbone_files import load_backbone
from fedemb.models.backbones import trainable_variables
from fedemb.privacy import running as queries
from fedemb.release.privacy_rules import public_line
from fedemb.steps import train_model
from fedemb.training import attempt, trainer, working_state
from fedemb.training.trainer import ClientLoader, all_classes
from fedemb.training.working_state import RoundLog
from tests.kit.pipeline_runs.forked import SERVER
from tests.kit.pipeline_runs.training_run import (
    HEAD,
    RUN_ID,
    SIZE,
    TREE,
    classifier_config,
    config,
    covariance_config,
    killed_at,
    prepare,
    round_times,
    write_users,
)
from tests.kit.verified import without_digests


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def finished(prepared, tmp_path_factory):
    run = prepared.copy(tmp_path_factory.mktemp("finished") / "run")
    run.train()
    return run


@pytest.fixture
def ready(prepared, tmp_path):
    return prepared.copy(tmp_path / "run")


def _same_model(one, other):
    assert tree_digests(one.root / "model") == tree_digests(other.root / "model")


def test_model_is_the_backbone_and_nothing_else(finished):
    card = json.loads((finished.root / "model" / "model.json").read_text())
    assert sorted(p.name for p in (finished.root / "model").iterdir()) == [
        "backbone.keras",
        "model.json",
        "rounds.jsonl",
    ]
    backbone = load_backbone(finished.root / "model" / "backbone.keras", finished.config.model)
    start = load_backbone(finished.root / "pretrained" / "backbone.keras", finished.config.model)
    names = {v.path for v in start.trainable_variables}
    assert {v.path for v in backbone.weights} == names == {t["name"] for t in card["tensors"]}
    assert not any(re.search("head|slot|momentum|optimizer", name) for name in names)
    assert not np.array_equal(backbone.get_weights()[0], start.get_weights()[0])
    assert card["rounds_run"] == 6
    assert card["weights_sha"] == file_digest(finished.root / "model" / "backbone.keras")


def test_diagnostics_are_raw_and_complete(finished):
    folder = finished.private / "diagnostics"
    lines = [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(6))
    assert {"clients", "clipped", "norm_median", "nonfinite", "noise_to_signal"} <= set(lines[0])
    assert len({line["clients"] for line in lines}) > 1  # the secret: it changes by round


def test_commit_closes_the_attempt_and_destroys_the_root_key(finished):
    context = finished.context()
    attempt = context.ledger.attempt(read_reservation(context.artifacts.reservation))
    log = attempt.commit.body["round_log"]
    assert log["rounds_started"] == 6
    assert log["sha"] == file_digest(finished.root / "model" / "rounds.jsonl")
    assert log["card_sha"] == file_digest(finished.root / "model" / "model.json")
    keys, key = context.keys, f"reservation/{RUN_ID}-{attempt.reserve.attempt}"
    assert (keys.used(key), keys.exists(key)) == (True, False)
    assert keys.fetch("ledger/default+run-1").hex() == attempt.bind.sha


def test_running_again_after_the_commit_gives_the_same_model(finished, tmp_path):
    before = finished.copy(tmp_path / "run")
    shutil.rmtree(finished.root / "model")
    finished.train()
    _same_model(before, finished)


def test_key_rotation_after_the_commit_keeps_the_model_card(finished):
    """Killed before kfp had the model, it is started again: with a new signature the card would be
    one that was never committed."""
    context = finished.context()
    card = (finished.root / "model" / "model.json").read_bytes()
    rotate_keys(context.ledger_uri, context.keys, "leaked", ["trainer"])
    shutil.rmtree(finished.root / "model")
    finished.train()
    assert (finished.root / "model" / "model.json").read_bytes() == card


def test_checkpoint_holds_no_head_and_no_optimizer_of_clients(finished):
    folder = next((finished.private / "train").iterdir())
    _, _, data = (folder / "checkpoint.npz").read_bytes().partition(b"\n")  # its signature
    with np.load(io.BytesIO(data)) as packed:
        sizes = {name: packed[name].size for name in packed.files if name != "head"}
    dim = sum(
        v.size
        for v in load_backbone(
            finished.root / "pretrained" / "backbone.keras", finished.config.model
        ).get_weights()
    )
    assert sizes == {"weights": dim, "momentum": dim, "average": dim}
    for record in (folder / "rounds").iterdir():
        assert record.read_bytes().endswith(b"\n\0")  # the mean is cut once a checkpoint covers it
        assert record.stat().st_size < 2000


@pytest.mark.long
def test_committed_round_is_never_computed_again(ready, finished, monkeypatch):
    _interrupted(ready)
    computed = []
    original = queries.Mechanism.aggregate

    def aggregate(self, index, state):
        computed.append(index)
        return original(self, index, state)

    monkeypatch.setattr(queries.Mechanism, "aggregate", aggregate)
    ready.train()
    assert computed == [1, 2, 3, 4, 5]
    _same_model(ready, finished)


@pytest.mark.long
def test_killed_before_the_commit_finishes_without_a_new_round(ready, finished, monkeypatch):
    with killed_at(attempt, "write_signed"):
        ready.train()
    monkeypatch.setattr(trainer.Trainer, "__init__", lambda *_: pytest.fail("trains again"))
    ready.train()
    _same_model(ready, finished)


@pytest.mark.long
def test_sigterm_finishes_the_round_and_exits_with_its_own_code(ready, finished, monkeypatch):
    original = RoundLog.commit

    def terminated(self, index, *rest):
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, index, *rest)

    monkeypatch.setattr(RoundLog, "commit", terminated)
    with pytest.raises(Interrupted, match="after round 3 of 6") as stopped:
        ready.train()
    assert stopped.value.exit_code == 5
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not (ready.root / "model").exists()
    ready.train()
    _same_model(ready, finished)


def _interrupted(ready):
    with killed_at(working_state, "save_checkpoint"):
        ready.train()


@pytest.mark.long
@pytest.mark.parametrize("what", ["users", "weights", "code", "configuration", "backend"])
def test_resume_with_changed_inputs_is_refused(ready, monkeypatch, what):
    _interrupted(ready)
    changed = ready.config
    if what == "users":
        index = ready.private / "users" / "users-00000-of-00001.parquet"
        index.write_bytes(index.read_bytes() + b" ")
    elif what == "weights":
        from fedemb.steps import pretrain_public

        folder = ready.root / "pretrained"
        start = changed.backbone_config().model_copy(update={"seed": 99})
        pretrain_public.run(start, folder, ready.context().keys)
    elif what == "code":
        monkeypatch.setattr(working_state, "code_digest", lambda _config: "f" * 64)
    elif what == "backend":
        changed = config(**{"training.backend": "jax"})
    else:
        changed = config(**{"training.seed": 5})
    with pytest.raises(PlanMismatch, match=r"new id|plan_privacy again|pretrain_public again"):
        ready.train(changed)


def test_backbone_of_another_model_is_refused(ready):
    """Its weights are the same here, and what it was made for is not."""
    from fedemb.steps import pretrain_public

    start = ready.config.backbone_config()
    other = start.model.model_copy(update={"aspect_ratio": "letterbox"})
    folder = ready.root / "pretrained"
    pretrain_public.run(start.model_copy(update={"model": other}), folder, ready.context().keys)
    with pytest.raises(PlanMismatch, match="not the one that pretrain_public signed"):
        ready.train()


@pytest.mark.long
def test_resume_with_another_evaluation_gives_the_same_model(ready, finished):
    _interrupted(ready)
    ready.train(config(**{"evaluation.bootstrap_samples": 77, "release.version": "2"}))
    _same_model(ready, finished)


@pytest.mark.long
def test_second_trainer_of_the_same_attempt_is_refused(ready, finished, monkeypatch):
    original = RoundLog.commit

    def late(self, index, mechanism, output):
        original(self, index, mechanism, output)  # the other one was faster
        return original(self, index, mechanism, output)

    monkeypatch.setattr(RoundLog, "commit", late)
    with pytest.raises(PlanMismatch, match="another trainer"):
        ready.train()
    monkeypatch.undo()
    ready.train()
    _same_model(ready, finished)


def test_users_of_other_blocks_than_were_reserved_are_refused(ready):
    path = ready.context().artifacts.users
    users = json.loads(path.read_bytes())
    signer = Signer.newest(ready.context().keys, "partition")
    path.write_bytes(encode(sign_document({**users, "blocks": ["all/0", "all/1"]}, signer)))
    with pytest.raises(PlanMismatch, match=r"users\.blocks"):
        ready.train()


def test_training_needs_the_root_key(ready):
    context = ready.context()
    attempt = read_reservation(context.artifacts.reservation).attempt
    context.keys.destroy(f"reservation/{RUN_ID}-{attempt}")
    with pytest.raises(LedgerError):
        ready.train()


@pytest.mark.long
def test_root_key_that_changed_since_the_first_round_is_refused(ready):
    with killed_at(RoundLog, "commit", 2, after=True):
        ready.train()
    attempt = read_reservation(ready.context().artifacts.reservation).attempt
    path = ready.context().keys._path(f"reservation/{RUN_ID}-{attempt}")
    kept = path.read_bytes()
    path.write_bytes(bytes([kept[0] ^ 1, *kept[1:]]))
    with pytest.raises(PlanMismatch, match="key_sha"):
        ready.train()
    path.write_bytes(kept)
    ready.train()


@pytest.mark.long
def test_injected_key_stays_on_the_model_card(ready, finished):
    card = json.loads((finished.root / "model" / "model.json").read_text())
    assert card["key_injected"] is False
    with killed_at(RoundLog, "commit", 2, after=True):
        train_model.run(ready.context(), root_key=bytes(32))
    ready.train()  # the other rounds from the secret key, too late
    assert json.loads((ready.root / "model" / "model.json").read_text())["key_injected"] is True
    ours, theirs = (read_rounds(run.root / "model" / "rounds.jsonl") for run in (ready, finished))
    assert all(ours[index] != theirs[index] for index in (0, 1))


def test_release_refuses_an_injected_key(ready):
    release = ready.config.updated({"purpose": "release"})
    with pytest.raises(ConfigError, match="root_key"):
        train_model.run(ready.context(release), root_key=bytes(32))


def test_trainer_writes_the_documents_that_the_gate_reads(finished):
    _of_the_gates_form(finished)


def _of_the_gates_form(run):
    plan, _ = read_plan(run.context().artifacts.privacy_plan, run.config)
    rounds = read_rounds(run.root / "model" / "rounds.jsonl")
    read(run.root / "model" / "model.json", ModelCard)
    for index, entry in enumerate(rounds):
        assert entry == public_line(plan, index, entry.output_sha)
    assert len(rounds) == plan.rounds


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [config(), covariance_config(), classifier_config(), classifier_config(**HEAD)],
    ids=["clients", "covariance", "units", "head"],
)
def test_training_log_does_not_depend_on_the_participants(tmp_path, caplog, settings):
    """Also not on whether they are fewer than the public number of users."""
    said = []
    for users in (20, 39, 40):
        caplog.clear()
        caplog.set_level("INFO", logger="fedemb")
        run = prepare(tmp_path / str(users), settings, users=users)
        run.train()
        paths = [run.root / "model" / name for name in ("model.json", "rounds.jsonl")]
        said.append([record.getMessage() for record in caplog.records])
        said[-1] += map(without_digests, paths)
    assert said[0] == said[1] == said[2]
    assert f"round {settings.mechanism.rounds}/{settings.mechanism.rounds}" in said[0]


ALGORITHMS = {
    "tree": config(**TREE),
    "fedemb": config(**{"mechanism.noise_multiplier": 0.0}),
    "units": classifier_config(),
    "head": classifier_config(**HEAD),
    "fedavg": config(**{"training.algorithm": "dp_fedavg"}),
    "groupings-bfloat16": config(**{"partition.groupings": 3, "training.mixed_precision": True}),
    "standardised": config(**{"model.backbone": "resnet8_ws", "partition.virtual_clients": 4}),
    "projection": config(**{"model.trainable": "projection", "partition.groupings": 3}),
}
AT_NIGHT = [*ALGORITHMS][4:]
ACTS = [
    (place, name, after)
    for place, name in ((RoundLog, "commit"), (working_state, "save_checkpoint"))
    for after in (False, True)
]
"""Where a kill strikes: before and after a round comes on record, and its checkpoint."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in AT_NIGHT else pytest.mark.long)
        for name in ALGORITHMS
    ],
)
def test_each_algorithm_trains_its_variables_and_resumes_to_the_same_bits(tmp_path, name):
    whole = prepare(tmp_path / "one", ALGORITHMS[name])
    broken = whole.copy(tmp_path / "two")
    whole.train()
    _of_the_gates_form(whole)
    model, start = (
        load_backbone(whole.root / folder / "backbone.keras", whole.config.model)
        for folder in ("model", "pretrained")
    )
    moved = {
        after.path
        for after, before in zip(model.weights, start.weights, strict=True)
        if not np.array_equal(after.numpy(), before.numpy())
    }
    trained = trainable_variables(model, whole.config.model.trainable)
    assert moved == {variable.path for variable in trained}
    for place, act, after in ACTS:
        with killed_at(place, act, after=after):
            broken.train()
    broken.train()
    _same_model(whole, broken)


def test_dp_fedavg_is_refused_in_a_release(prepared):
    release = {"purpose": "release", "policy.users_lower_bound": 100}
    with pytest.raises(ConfigError, match="purpose: simulation"):
        prepared.train(config(**release, **{"training.algorithm": "dp_fedavg"}))


BARE = {
    "kind": "group_poisson_gaussian",
    "rounds": 1,
    "sampling_probability": 0.5,
    "noise_multiplier": 0.0,
}


@pytest.fixture
def twin(ready):
    """A second trainer of the same reservation, with a private root of its own."""
    shutil.copytree(ready.root / "private", ready.root / "elsewhere")
    return lambda: train_model.run(ready.context(private="elsewhere", model="model of the twin"))


def _beside(monkeypatch, act):
    """Lets something happen while round 2 is being trained."""
    original, happened = RoundLog.commit, []

    def late(self, index, *rest):
        if index == 2 and not happened:
            happened.append(1)
            act()
        return original(self, index, *rest)

    monkeypatch.setattr(RoundLog, "commit", late)


@pytest.mark.long
def test_second_trainer_with_another_private_root_is_refused(ready, twin, finished, monkeypatch):
    def meanwhile():
        with pytest.raises(Refused, match="another private root"):
            twin()

    _beside(monkeypatch, meanwhile)
    ready.train()
    assert not (ready.root / "elsewhere" / RUN_ID / "train" / "attempt-1" / "rounds").exists()
    assert not (ready.root / "model of the twin").exists()
    with pytest.raises(Refused, match="another private root"):
        twin()
    _same_model(ready, finished)


def test_training_from_a_copied_private_root_is_refused(ready, twin):
    _interrupted(ready)
    shutil.rmtree(ready.root / "elsewhere")
    shutil.copytree(ready.root / "private", ready.root / "elsewhere")  # with its mark
    with pytest.raises(Refused, match="another private root"):
        twin()


def test_one_round_solves_the_projection_and_leaves_no_features_behind(tmp_path):
    run = prepare(tmp_path / "run", covariance_config(), users=101)
    assert run.train()["rounds_run"] == 1
    (line,) = (run.root / "model" / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == {"type": "gaussian", "noise_multiplier": 1.0}
    kernel = load_backbone(run.root / "model" / "backbone.keras", run.config.model).weights[-1]
    kept = np.linalg.svd(kernel.numpy(), compute_uv=False)
    assert kept[-1] < 1e-6 < kept[-2]  # without the direction of the mean
    assert not [path for path in run.root.rglob("*") if "features" in path.parts]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.algorithm": "dp_fedemb"}, "contradicts mechanism.kind=covariance"),
        ({"mechanism": BARE}, "contradicts mechanism.kind=group_poisson_gaussian"),
        ({"model.trainable": "all"}, "model.trainable=all"),
        ({"policy.unit": "image"}, "policy.unit=image"),
        ({"training.backend": "jax"}, "training.backend: tensorflow"),
        ({"partition.max_images_per_user": 8193}, "max_images_per_user=8193"),
    ],
)
def test_settings_that_contradict_dp_covariance_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        covariance_config(**changes)


# ---- SIGKILL at random moments of a real process, then resume: the bits of an unbroken run ----


def _train(run, seconds=None):
    """A trainer, killed so many seconds after its first new round; returns its exit status."""
    process, before = SERVER.Process(target=run.train), len(round_times(run))
    process.start()
    if seconds is not None:
        while process.is_alive() and len(round_times(run)) == before:
            time.sleep(0.001)
        time.sleep(seconds)
        process.kill()
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_killed_twenty_times_resumes_bit_identical(tmp_path):
    kills = 20
    settings = config(**{"mechanism.rounds": 3 * kills, "training.local.epochs": 4})
    whole = prepare(tmp_path / "whole", settings, users=120)
    killed = whole.copy(tmp_path / "killed")  # the same keys: the same coins, noise
    assert _train(whole) == 0
    round_seconds = np.median(np.diff(round_times(whole)))
    # Every trainer commits a round, then dies somewhere in the next one or two.
    times = np.random.default_rng(6).uniform(0, 1.5, kills) * round_seconds
    statuses = [_train(killed, seconds) for seconds in times]
    assert statuses.count(-signal.SIGKILL) >= 0.8 * kills  # they met a living trainer
    assert _train(killed) == 0
    _same_model(whole, killed)


# ---- Examples of virtual clients come from the users on disk, and stay decoded for a while ----


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feed") / "users"
    write_users(folder, users=20, virtual_clients=4, groupings=1)
    return UserStore(VerifiedFolder(folder))


def _client(*users):
    return SimpleNamespace(grouping=0, group=1, users=np.array(users, np.int64))


def test_client_examples_are_those_of_its_users(store):
    found = ClientLoader(store, config().model, max_examples=2048).load(_client(3, 5))
    assert found.images.shape == (6, SIZE, SIZE, 1)
    assert set(found.labels) == {label for user in store.read([3, 5]) for label in user.labels}
    assert len(ClientLoader(store, config().model, max_examples=2048).load(_client()).labels) == 0


def test_image_sampled_alone_is_loaded_without_the_others_of_its_owner(store):
    loaders = [
        ClientLoader(store, config().model, max_examples=2048, one_image=alone)
        for alone in (False, True)
    ]
    for place in (0, 2, 3):  # a user has three
        client = SimpleNamespace(grouping=place, group=1, users=np.array([3]))
        every, one = (loader.load(client) for loader in loaders)
        np.testing.assert_array_equal(one.images, every.images[place : place + 1])
        np.testing.assert_array_equal(one.labels, every.labels[place : place + 1])


def test_cache_is_bounded_in_bytes_and_keeps_what_was_used_last(store, monkeypatch):
    reads = []
    loader = ClientLoader(store, config().model, max_examples=2048, cache_bytes=2 * 3 * SIZE * SIZE)
    original = loader._read
    monkeypatch.setattr(loader, "_read", lambda users: reads.append(users[0]) or original(users))
    for user in (0, 1, 0, 2, 0, 1):  # room for two: 2 pushes 1 out, not 0
        loader.load(_client(user))
    assert reads == [0, 1, 2, 1]
    held = sum(images.nbytes for images, _ in loader._cache.values())
    assert held <= 2 * 3 * SIZE * SIZE


def test_shared_head_rows_come_from_all_classes(store):
    classes = all_classes(store)
    assert len(classes) == 21  # one of each user's own, and one shared by all
    found = ClientLoader(store, config().model, max_examples=2048, classes=classes).load(_client(3))
    np.testing.assert_array_equal(classes[found.labels], store.read([3])[0].labels)
