"""The whole DAG, for real, on small built-in data: release, refusal, simulation, interruption."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedemb.documents.artifacts import RunArtifacts
from fedemb.foundation.canonical_json import file_digest
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.runtime.step_context import StepContext
from tests.kit.pipeline_runs.whole_run import (
    SMALL_CLASSIFIER,
    SMALL_EMBEDDING,
    closing_line,
    fedemb,
    finish,
    run_command,
)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A run with a lasting policy that ends in a release."""
    folder = tmp_path_factory.mktemp("released")
    done = finish(
        run_command(folder / "runs", "--run-id", "first", "--policy", str(folder / "policy"))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_run_ends_with_guarantee_utility_release_and_report(released):
    folder, output = released
    assert "differential privacy for one user" in closing_line(output, "guarantee")
    assert closing_line(output, "utility")
    assert Path(closing_line(output, "release").partition(" (")[0].removeprefix("file://")).is_dir()
    assert (
        Path(closing_line(output, "report")) == (folder / "runs" / "first" / "index.html").resolve()
    )


def test_nothing_raw_lies_outside_the_private_root(released):
    folder, _ = released
    run = folder / "runs" / "first"
    for path in run.rglob("*"):
        raw = path.name.startswith(("users-", "evaluation-", "diagnostics", "scores", "rejects"))
        assert not raw or (run / "private") in path.parents, path
    assert (run / "private").stat().st_mode & 0o077 == 0


def test_bundle_verifies_offline(released):
    folder, output = released
    bundle = closing_line(output, "release").partition(" (")[0]
    ledger = folder / "policy" / "ledger"
    trust = ["--trust", str(ledger / "trust.json"), "--ledger", str(ledger)]
    done = CliRunner().invoke(app, ["verify", bundle, *trust])
    assert done.exit_code == 0, done.output
    assert "verified" in done.output


@pytest.mark.long
def test_figures_of_training_users_do_not_pass_for_those_of_held_out_ones(released, tmp_path):
    """A second private root whose evaluation/ is a copy of users/, named for the measurement."""
    folder, _ = released
    shutil.copytree(folder, tmp_path / "copy")
    run, ledger = tmp_path / "copy" / "runs" / "first", folder / "policy" / "ledger"
    other = tmp_path / "other"
    shutil.copytree(run / "private", other)
    shutil.rmtree(other / "first" / "evaluation")
    shutil.copytree(other / "first" / "users", other / "first" / "evaluation")
    records = len(list(ledger.rglob("*.json")))
    command = fedemb("run", "--resume", str(run), "--from", "evaluate_model")
    command += ["--set", "release.version=two", "--set", f"storage.private_root={other}"]
    done = finish(command)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "of run first is not the folder the run is bound to" in done.stdout + done.stderr
    assert len(list(ledger.rglob("*.json"))) == records
    assert not list(tmp_path.rglob("two"))


@pytest.mark.slow
def test_second_run_of_a_planned_series_of_one_is_refused_before_it_reads_data(released):
    folder, _ = released
    done = finish(
        run_command(folder / "runs", "--run-id", "second", "--policy", str(folder / "policy"))
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Nothing was read or written" in done.stderr
    assert not (folder / "runs" / "second").exists()


@pytest.mark.slow
def test_simulation_never_releases(tmp_path):
    overrides = [
        *SMALL_EMBEDDING,
        "purpose=simulation",
        "mechanism.noise_multiplier=0.01",
        "policy.certify_at=[100000]",
    ]
    done = finish(run_command(tmp_path / "runs", "--run-id", "only", overrides=overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    assert closing_line(done.stdout, "release") == "none (simulation)"
    assert "projected epsilon" in closing_line(done.stdout, "guarantee")
    releases = tmp_path / "runs" / "only" / "releases"
    assert not releases.exists() or not list(releases.rglob("*.keras"))


@pytest.mark.long
def test_too_little_noise_is_refused_with_reason_and_remedy(tmp_path):
    overrides = [*SMALL_EMBEDDING, "mechanism.noise_multiplier=0.1"]
    done = finish(run_command(tmp_path / "runs", overrides=overrides))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "above policy.epsilon_cap=8" in done.stderr
    assert "Raise mechanism.noise_multiplier" in done.stderr
    assert not (tmp_path / "runs").exists(), "before the charge"


@pytest.mark.slow
def test_interrupted_run_resumes_and_releases(tmp_path):
    overrides = [*SMALL_EMBEDDING, "mechanism.rounds=30", "mechanism.noise_multiplier=4.0"]
    command = run_command(tmp_path / "runs", "--run-id", "only", overrides=overrides)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        log = tmp_path / "runs" / "only" / "run.log"
        deadline = time.monotonic() + 300
        while "round 2/" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 5, output
    typed_again = finish(command)
    assert typed_again.returncode == 2
    assert closing_line(output, "resume with") in typed_again.stderr
    _, *resume = shlex.split(closing_line(output, "resume with"))
    done = finish([sys.executable, "-m", "fedemb", *resume])
    assert done.returncode == 0, done.stdout + done.stderr
    log = next((tmp_path / "runs" / "only").glob("releases/**/rounds.jsonl")).read_text()
    assert [json.loads(line)["round"] for line in log.splitlines()] == list(range(30))


# ---- DP-SGD through the whole DAG: a verified classifier, a kill inside a round ----


STARTED = re.compile(r'fedemb-event: (\{"kind": "step_started", "step": "train_model".*\})')


ROUNDS = 100
"""Of the killed training: enough that the kill comes before the last."""
LONGER = (
    f"mechanism.rounds={ROUNDS}",
    "mechanism.noise_multiplier=8.0",
    "training.server.learning_rate=1e-4",  # or the noise makes the probabilities useless
)


def _command_classifier(runs: Path, *extra: str, longer: tuple[str, ...] = ()) -> list[str]:
    overrides = [*SMALL_CLASSIFIER, *longer]
    return run_command(runs, "--config", "dp_sgd_quickstart", *extra, overrides=overrides)


def _killed_inside_a_round(command: list[str], log: Path) -> None:
    """Runs a command, and kills the trainer as soon as it says that its first round is done."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while "round 1/" not in (text := log.read_text() if log.exists() else ""):
            assert process.poll() is None, text[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (event,) = (json.loads(found[1]) for found in STARTED.finditer(text))
        os.kill(event["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=300)
    assert process.returncode != 0, output


def _records(run: Path) -> list[Path]:
    return list(run.glob("private/**/train/attempt-1/rounds/*.record"))


@pytest.mark.long
def test_run_ends_with_a_released_classifier_that_verifies(tmp_path):
    done = finish(_command_classifier(tmp_path / "runs", "--run-id", "only"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differential privacy for one user" in closing_line(done.stdout, "guarantee")
    assert "Top-1 over 10 classes" in closing_line(done.stdout, "utility")
    ledger = tmp_path / "runs" / "only" / "policy" / "ledger"
    trust = ["--trust", str(ledger / "trust.json"), "--ledger", str(ledger)]
    verified = CliRunner().invoke(
        app, ["verify", closing_line(done.stdout, "release").partition(" (")[0], *trust]
    )
    assert verified.exit_code == 0, verified.output
    assert "verified" in verified.output


@dataclass
class Killed:
    """A reservation whose trainer was killed in its second round, and what became of it twice."""

    whole: Path
    """The run directory, trained again from its first round, without a kill, and released."""
    output: str
    killed: RunDirectory
    """As the kill left it, where its ledger says it is."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Both trainings draw from one reservation's key: what differs is the kill."""
    folder = tmp_path_factory.mktemp("classifier")
    run, copy = folder / "runs" / "only", folder / "copy"
    command = _command_classifier(folder / "runs", "--run-id", "only", longer=LONGER)
    _killed_inside_a_round(command, run / "run.log")
    assert 0 < len(_records(run)) < ROUNDS
    shutil.copytree(run, copy, symlinks=True)
    for path in _records(run)[0].parent.parent.iterdir():  # as if no round had ever been computed
        if path.name == "rounds":
            shutil.rmtree(path)
        elif path.name.startswith(("audit", "checkpoint")):
            path.unlink()
    done = finish(fedemb("run", "--resume", str(run)))
    assert done.returncode == 0, done.stdout + done.stderr
    run.rename(folder / "whole")
    copy.rename(run)
    return Killed(folder / "whole", done.stdout, RunDirectory.open(run))


def _bundle(runs: Killed) -> Path:
    address = Path(closing_line(runs.output, "release").partition(" (")[0].removeprefix("file://"))
    return runs.whole / address.relative_to(runs.killed.root)


@pytest.mark.slow
def test_killed_inside_a_round_it_goes_on_to_the_same_bits(runs, tmp_path):
    from fedemb.steps import train_model

    run = runs.killed
    started = len(_records(run.root))
    inputs = ("privacy_plan", "reservation", "users", "pretrained")
    made = {"model": tmp_path}
    artifacts = RunArtifacts(**{name: run.output(name) for name in inputs}, **made)
    stores = {name: uri for name, uri in run.stores().items() if name != "releases"}
    train_model.run(StepContext(artifacts, config=run.config(), run_id=run.run_id, **stores))
    assert 0 < started < ROUNDS
    for name in ("backbone.keras", "rounds.jsonl"):
        assert file_digest(_bundle(runs) / name) == file_digest(tmp_path / name)


# ---- A run whose trainer computes on JAX: price, documents and gate are those of TensorFlow ----


DOCUMENTS = ("privacy_plan", "reservation", "audit_report", "utility_report", "privacy_report")


def _shape(value: Any) -> Any:
    """Names of fields, whatever they hold; confusion is shown only of classes with enough units."""
    if isinstance(value, dict):
        return {name: name != "confusion" and _shape(item) for name, item in value.items()}
    return None


def _run(runs: Path, backend: str, preset: str, overrides: list[str]) -> tuple[RunDirectory, str]:
    extra = ("--config", preset, "--run-id", backend)
    settings = [*overrides, f"training.backend={backend}"]
    done = finish(run_command(runs, *extra, overrides=settings))
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDirectory.open(runs / backend), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "overrides"),
    [("dp_sgd_quickstart", SMALL_CLASSIFIER), ("quickstart", SMALL_EMBEDDING)],
)
def test_run_on_jax_is_priced_documented_judged_and_released_alike(tmp_path, preset, overrides):
    (plain, _), (jax, output) = (
        _run(tmp_path, backend, preset, overrides) for backend in ("tensorflow", "jax")
    )
    for name in DOCUMENTS:
        assert _shape(jax.document(name)) == _shape(plain.document(name)), name
    ours, theirs = jax.document("privacy_report"), plain.document("privacy_report")
    assert ours["accounting"] == theirs["accounting"]
    assert ours["adjacency"] == theirs["adjacency"]
    assert ours["model_sha"] != theirs["model_sha"], "another backend gives other bits"
    assert ours["provenance"]["inputs_sha"] != theirs["provenance"]["inputs_sha"]
    for run in (jax, plain):
        assert run.document("verdict")["allow"] is True
    ledger = jax.root / "policy" / "ledger"
    trust = ["--trust", str(ledger / "trust.json"), "--ledger", str(ledger)]
    verified = CliRunner().invoke(
        app, ["verify", closing_line(output, "release").partition(" (")[0], *trust]
    )
    assert verified.exit_code == 0, verified.output
