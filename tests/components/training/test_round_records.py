"""Records of rounds with correlated noise: one size each, and bound to the rounds before them."""

import json
import shutil

import numpy as np
import pytest

from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.foundation.canonical_json import canonical_json
from fedemb.privacy.group_mechanisms import TreeAggregationConfig
from fedemb.privacy.noise import TagChain
from fedemb.privacy.planning import plan
from fedemb.privacy.running import build_mechanism, with_tags
from fedemb.storage import open_store
from fedemb.training import working_state
from fedemb.training.trainer import Trainer
from fedemb.training.working_state import RoundLog
from tests.components.training.test_training_state import _state
from tests.kit.pipeline_runs.training_run import config, prepare

INPUTS = "0" * 64
ROUNDS = 40
TREE = {
    "mechanism": {
        "kind": "tree_aggregation",
        "rounds": 6,
        "noise_multiplier": 1.0,
        "clients_per_round": 4,
    },
}


def mechanism():
    section = TreeAggregationConfig(
        rounds=ROUNDS,
        clients_per_round=2,
        noise_multiplier=2.0,
    )
    return build_mechanism(plan(section, virtual_clients=200), b"k" * 32, "run", 1, INPUTS)


def committed(folder, rounds=ROUNDS, seed=0):
    """A log of rounds, and the mechanism after the last one."""
    log, noised = RoundLog(open_store(str(folder))), mechanism()
    random = np.random.default_rng(seed)
    for index in range(rounds):
        output = noised.aggregate(index, random.integers(0, 9, 5))
        log.commit(index, noised, output)
    return log, noised


def record_path(folder, index):
    return folder / "rounds" / f"{index:06d}.record"


def test_records_do_not_grow_with_the_rounds(tmp_path):
    committed(tmp_path)
    sizes = [record_path(tmp_path, index).stat().st_size for index in range(10, ROUNDS)]
    assert max(sizes) - min(sizes) < 32, "only the digits of numbers differ"


def chain_of(log, rounds):
    chain = TagChain()
    for index in range(rounds):
        record = log.read(index)
        chain.append(bytes.fromhex(record.mechanism_state["tag"]))
        chain.check(record.tags_sha)
    return chain


def test_state_to_resume_from_follows_from_the_records(tmp_path):
    log, noised = committed(tmp_path, 12)
    chain, last = chain_of(log, 12), log.read(11)
    assert with_tags(last.mechanism_state, chain.tags) == noised.state_to_json()


@pytest.mark.parametrize("moved", [0, 3, 10])
def test_record_of_another_history_is_refused(tmp_path, moved):
    """Also if the record is the first one, and the last record is of its own log."""
    log, _ = committed(tmp_path / "own", 12)
    committed(tmp_path / "other", 12, seed=1)
    shutil.copy(record_path(tmp_path / "other", moved), record_path(tmp_path / "own", moved))
    with pytest.raises(ArtifactError, match="does not follow"):
        chain_of(log, 12)


@pytest.mark.parametrize("change", [b" ", b'{"more":1,', b"x"])
def test_record_with_other_bytes_is_refused(tmp_path, change):
    log, _ = committed(tmp_path, 2)
    path = record_path(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(change + data.removeprefix(b"{" if change.startswith(b"{") else b""))
    with pytest.raises(ArtifactError):
        log.read(1)
    path.write_bytes(data[:-4])
    with pytest.raises(ArtifactError, match="the record of round 1 is damaged"):
        log.read(1)


class Killed(BaseException):
    """What a test raises where a kill would strike."""


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """A training killed before round 5; its checkpoint covers four rounds."""
    run = prepare(tmp_path_factory.mktemp("killed") / "run", config(**TREE))
    original, save = RoundLog.commit, Trainer._save

    def killing(self, index, *rest):
        record = original(self, index, *rest)
        if index == 5:
            raise Killed
        return record

    def early(self, progress):
        if progress.state.rounds <= 4:
            save(self, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundLog, "commit", killing)
        patch.setattr(Trainer, "_save", early)
        with pytest.raises(Killed):
            run.train()
    return run


@pytest.fixture
def killed(killed_once, tmp_path):
    """The folder stays where it is, because the ledger knows the private root."""
    shutil.copytree(killed_once.root, tmp_path / "backup")
    yield killed_once
    shutil.rmtree(killed_once.root)
    shutil.copytree(tmp_path / "backup", killed_once.root)


def with_other_tag(run, index):
    """Signs a record with the tag of other sums, as the trainer would have with other data."""
    store = _state(run)
    name = f"rounds/{index:06d}.record"
    head, _, payload = store.read(name).partition(b"\n\0")
    fields = json.loads(head)
    fields["mechanism_state"]["tag"] = "ab" * 32
    store.write(name, canonical_json(fields) + b"\n\0" + payload)


@pytest.mark.parametrize("index", [4, 5])
def test_resume_refuses_a_record_that_does_not_follow_the_others(killed, index):
    with_other_tag(killed, index)
    with pytest.raises(ArtifactError, match=f"record of round {index} does not follow"):
        killed.train()
    assert not (killed.root / "model" / "model.json").exists()


def test_resume_refuses_a_checkpoint_of_another_history(killed):
    store = _state(killed)
    progress = working_state.load_checkpoint(store)
    progress.mechanism["tags"][1] = "ab" * 32
    working_state.save_checkpoint(store, progress)
    with pytest.raises(ArtifactError, match="record of round 3 does not follow"):
        killed.train()


def test_resume_refuses_a_gap_in_the_records(killed):
    record_path(killed.private / "train" / "attempt-1", 4).unlink()
    with pytest.raises(PlanMismatch, match="round 5 was committed by another trainer"):
        killed.train()


@pytest.mark.long
def test_resume_without_a_change_ends_with_a_model(killed):
    """Control for the tests above."""
    assert killed.train()["rounds_run"] == 6
