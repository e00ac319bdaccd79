"""The whole DAG, for real, on small built-in data: release, refusal, simulation, interruption."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedemb.pipelines.run.directory import RunDirectory
from tests.kit.cli import fedemb as cli
from tests.kit.pipeline_runs.whole_run import (
    SMALL_CLASSIFIER,
    SMALL_EMBEDDING,
    closing_line,
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


def _verify(output, policy):
    """Verifies the release that a run names in its last lines."""
    bundle = closing_line(output, "release").partition(" (")[0]
    assert "verified" in cli("verify", bundle, "--policy", policy)


@pytest.mark.long
def test_run_ends_with_guarantee_utility_release_and_report(released):
    folder, output = released
    assert "is protected with epsilon" in closing_line(output, "guarantee")
    assert closing_line(output, "utility")
    assert "fedemb embed PHOTOS" in closing_line(output, "next")
    assert Path(closing_line(output, "release").partition(" (")[0].removeprefix("file://")).is_dir()
    assert (
        Path(closing_line(output, "report")) == (folder / "runs" / "first" / "index.html").resolve()
    )


@pytest.mark.long
def test_raw_files_exist_only_in_the_private_root(released):
    folder, _ = released
    run = folder / "runs" / "first"
    for path in run.rglob("*"):
        raw = path.name.startswith(("users-", "evaluation-", "diagnostics", "scores", "rejects"))
        assert not raw or (run / "private") in path.parents, path
    assert (run / "private").stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_bundle_verifies_offline(released):
    folder, output = released
    _verify(output, folder / "policy")


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


@pytest.mark.long
def test_run_ends_with_a_released_classifier_that_verifies(tmp_path):
    words = ("--config", "dp_sgd_quickstart", "--run-id", "only")
    done = finish(run_command(tmp_path / "runs", *words, overrides=SMALL_CLASSIFIER))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is protected with epsilon" in closing_line(done.stdout, "guarantee")
    assert "Top-1 over 10 classes" in closing_line(done.stdout, "utility")
    _verify(done.stdout, tmp_path / "runs" / "only" / "policy")


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
def test_jax_run_has_the_price_documents_and_verdict_of_tensorflow(tmp_path, preset, overrides):
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
    _verify(output, jax.root / "policy")
