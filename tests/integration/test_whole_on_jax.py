"""A run whose trainer computes on JAX: price, documents and gate are those of TensorFlow."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.directory import RunDirectory
from tests.kit.pipeline_runs.whole_run import (
    SMALL_CLASSIFIER,
    SMALL_EMBEDDING,
    closing_line,
    finish,
    run_command,
)

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
