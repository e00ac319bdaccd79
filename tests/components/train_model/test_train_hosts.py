"""Two processes that train together on JAX: the bits of one, and what is left when one is lost."""

import functools
import json
import signal

import numpy as np
import pytest

from fedemb.errors import ConfigError, PlanMismatch
from fedemb.foundation.canonical_json import file_digest
from fedemb.training import hosts
from fedemb.training.host_messages import LOST, JobHost
from tests.kit.pipeline_runs.host_processes import embedded, played
from tests.kit.pipeline_runs.training_run import ReadyRun, config, round_times

SOUND = ("alone", "killed", "together")
FAULTS = ("alone", "lost", "again:lost", "chief_lost", "preempted")
TASKS = [pytest.param(task, marks=pytest.mark.slow) for task in ("embedding", "classification")]
"""Each starts four processes that load both backends."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Folder and ends of scenes of a task, which are played once."""

    @functools.cache
    def of(task, scenes=SOUND):
        folder = tmp_path_factory.mktemp(task)
        return folder, played(folder, task, *scenes)

    return of


def _digests(folder, scene):
    files = ("backbone.keras", "rounds.jsonl")
    return [file_digest(folder / scene / "model" / file) for file in files]


def _charges(folder, scene):
    """Kinds of the ledger's records, of which a charge is one."""
    files = sorted((folder / scene).glob("ledger/*/0*.json"))
    kinds = [json.loads(file.read_text())["kind"] for file in files]
    assert kinds.count("reserve") == kinds.count("commit") == 1
    return kinds


@pytest.mark.parametrize("task", TASKS)
def test_training_on_two_hosts_is_bit_identical_to_one(job, task):
    folder, found = job(task)
    for scene in ("alone", "together"):
        assert found[scene]["chief"][0] == 0, found[scene]
    assert found["together"]["other"][0] == 0, found["together"]
    assert "training on 2 hosts" in found["together"]["chief"][1]
    assert _digests(folder, "alone") == _digests(folder, "together")


def _replay(folder, found, scene):
    """Record and replay by the trainer itself: of virtual clients, or of unit gradients."""
    code, said = found[scene]["chief"]
    assert code == 0, said
    card = json.loads((folder / scene / "model" / "model.json").read_text())
    return card["mechanism_audit"]["replay"]


@pytest.mark.parametrize("task", TASKS)
def test_replay_of_recorded_rounds_passes_on_one_and_two_hosts(job, task):
    replays = [_replay(*job(task), scene) for scene in ("alone", "together")]
    assert replays == 2 * [{"rounds": 2, "failed": []}]


@pytest.mark.parametrize("task", TASKS)
def test_killed_after_every_round_and_resumed_gives_the_same_bits_at_the_same_charge(job, task):
    folder, found = job(task)
    assert found["killed"]["codes"] == [-signal.SIGKILL] * 3 + [0], found["killed"]
    assert _digests(folder, "alone") == _digests(folder, "killed")
    assert _charges(folder, "alone") == _charges(folder, "killed")


@pytest.mark.slow
def test_training_resumes_identically_after_losing_a_host(job):
    folder, found = job("embedding", FAULTS)
    code, said = found["lost"]["chief"]
    assert code == 4, said
    assert LOST in said
    assert 0 < found["lost"]["rounds"] < 3
    # One host is enough to continue: the round that was lost is drawn again to the bit.
    assert found["again:lost"]["chief"][0] == 0, found["again:lost"]
    assert _digests(folder, "alone") == _digests(folder, "lost")
    assert _charges(folder, "alone") == _charges(folder, "lost")


@pytest.mark.slow
def test_stopped_chief_finishes_its_round_and_stops_the_other_host(job):
    _, found = job("embedding", FAULTS)
    code, said = found["preempted"]["chief"]
    assert code == 5, said
    assert found["preempted"]["other"][0] == 0, found["preempted"]


@pytest.mark.slow
def test_jax_model_embeds_alike_on_tensorflow(job):
    folder, _ = job("embedding")
    on_jax = json.loads((folder / "alone" / "embedded.json").read_text())
    on_tensorflow = embedded(ReadyRun(folder / "alone", config()))
    np.testing.assert_allclose(on_tensorflow, on_jax, atol=1e-5)


@pytest.mark.slow
def test_attempt_started_on_jax_cannot_resume_on_tensorflow(job):
    folder, found = job("embedding", FAULTS)
    begun = ReadyRun(folder / "chief_lost", config())
    with pytest.raises(PlanMismatch, match="another configuration"):
        begun.train(config(**{"mechanism.rounds": 3}))
    assert len(round_times(begun)) == found["chief_lost"]["rounds"]


@pytest.mark.slow
def test_host_exits_with_code_4_when_the_chief_is_lost(job):
    _, found = job("embedding", FAULTS)
    code, said = found["chief_lost"]["other"]
    assert code == 4, said
    assert LOST in said


def _set(monkeypatch, **values):
    for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("count", "number", "address"),
    [("2", "2", "a:1"), ("2", "x", "a:1"), ("x", "0", "a:1"), ("2", "0", ""), ("2", "-1", "a:1")],
)
def test_invalid_jax_host_variables_are_refused(monkeypatch, count, number, address):
    _set(
        monkeypatch, JAX_NUM_PROCESSES=count, JAX_PROCESS_ID=number, JAX_COORDINATOR_ADDRESS=address
    )
    with pytest.raises(
        ConfigError, match=f"JAX_NUM_PROCESSES={count} and JAX_PROCESS_ID={number} "
    ):
        JobHost.of_environment()


def test_single_process_has_no_host_rank(monkeypatch):
    _set(monkeypatch)
    assert JobHost.of_environment() is None
    _set(monkeypatch, JAX_NUM_PROCESSES="1", JAX_PROCESS_ID="0", JAX_COORDINATOR_ADDRESS="a:1")
    assert JobHost.of_environment() is None


def test_chief_address_overrides_the_jax_coordinator(monkeypatch):
    _set(
        monkeypatch,
        JAX_NUM_PROCESSES="2",
        JAX_PROCESS_ID="1",
        JAX_COORDINATOR_ADDRESS="first-of-them:1",
        FEDEMB_CHIEF="10.0.0.7:2222",
    )
    assert JobHost.of_environment() == JobHost("10.0.0.7:2222", 3, 2)


def test_a_host_of_other_code_refuses_to_compute(tmp_path):
    job = {"config": config().model_dump(mode="json"), "code_sha": "0" * 64}
    with pytest.raises(hosts.PlanMismatch, match="is not that of the chief"):
        hosts._built(json.dumps(job).encode() + b"\n")
