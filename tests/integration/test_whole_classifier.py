"""DP-SGD through the whole DAG: a verified classifier, a kill inside a round."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedemb.documents.artifacts import RunArtifacts
from fedemb.foundation.canonical_json import file_digest
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.runtime.step_context import StepContext
from tests.kit.pipeline_runs.whole_run import (
    SMALL_CLASSIFIER,
    closing_line,
    fedemb,
    finish,
    run_command,
)

STARTED = re.compile(r'fedemb-event: (\{"kind": "step_started", "step": "train_dp_sgd".*\})')


ROUNDS = 100
"""Of the killed training: enough that the kill comes before the last."""
LONGER = (
    f"mechanism.rounds={ROUNDS}",
    "mechanism.noise_multiplier=8.0",
    "training.server.learning_rate=1e-4",  # or the noise makes the probabilities useless
)


def _command(runs: Path, *extra: str, longer: tuple[str, ...] = ()) -> list[str]:
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
    done = finish(_command(tmp_path / "runs", "--run-id", "only"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differential privacy for one user" in closing_line(done.stdout, "guarantee")
    assert "names the right one of 10 classes" in closing_line(done.stdout, "utility")
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
    command = _command(folder / "runs", "--run-id", "only", longer=LONGER)
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
    from fedemb.steps import train_dp_sgd

    run = runs.killed
    started = len(_records(run.root))
    inputs = ("privacy_plan", "reservation", "users", "pretrained")
    made = {"model": tmp_path}
    artifacts = RunArtifacts(**{name: run.output(name) for name in inputs}, **made)
    stores = {name: uri for name, uri in run.stores().items() if name != "releases"}
    train_dp_sgd.run(StepContext(artifacts, config=run.config(), run_id=run.run_id, **stores))
    assert 0 < started < ROUNDS
    for name in ("backbone.keras", "rounds.jsonl"):
        assert file_digest(_bundle(runs) / name) == file_digest(tmp_path / name)
