"""The whole DAG, for real, on small built-in data: release, refusal, simulation, interruption."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedemb.pipelines.cli.main import app
from tests.kit.pipeline_runs.whole_run import (
    SMALL_EMBEDDING,
    closing_line,
    fedemb,
    finish,
    run_command,
)


def _command(runs: Path, *extra: str, overrides: list[str] = SMALL_EMBEDDING) -> list[str]:
    return run_command(runs, *extra, overrides=overrides)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A run with a lasting policy that ends in a release."""
    folder = tmp_path_factory.mktemp("released")
    done = finish(
        _command(folder / "runs", "--run-id", "first", "--policy", str(folder / "policy"))
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
    command = fedemb("run", "--resume", str(run), "--from", "evaluate_embeddings")
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
        _command(folder / "runs", "--run-id", "second", "--policy", str(folder / "policy"))
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
    done = finish(_command(tmp_path / "runs", "--run-id", "only", overrides=overrides))
    assert done.returncode == 0, done.stdout + done.stderr
    assert closing_line(done.stdout, "release") == "none (simulation)"
    assert "projected epsilon" in closing_line(done.stdout, "guarantee")
    releases = tmp_path / "runs" / "only" / "releases"
    assert not releases.exists() or not list(releases.rglob("*.keras"))


@pytest.mark.long
def test_too_little_noise_is_refused_with_reason_and_remedy(tmp_path):
    overrides = [*SMALL_EMBEDDING, "mechanism.noise_multiplier=0.1"]
    done = finish(_command(tmp_path / "runs", overrides=overrides))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "above policy.epsilon_cap=8" in done.stderr
    assert "Raise mechanism.noise_multiplier" in done.stderr
    assert not (tmp_path / "runs").exists(), "before the charge"


@pytest.mark.slow
def test_interrupted_run_resumes_and_releases(tmp_path):
    overrides = [*SMALL_EMBEDDING, "mechanism.rounds=30", "mechanism.noise_multiplier=4.0"]
    command = _command(tmp_path / "runs", "--run-id", "only", overrides=overrides)
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
    records = [
        json.loads(line)
        for line in next((tmp_path / "runs" / "only").glob("releases/**/rounds.jsonl"))
        .read_text()
        .splitlines()
    ]
    assert [record["round"] for record in records] == list(range(30))
