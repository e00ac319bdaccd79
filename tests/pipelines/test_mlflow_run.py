"""Runs in MLflow, read from its server."""

import shutil
from pathlib import Path

import pytest

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import AwaitingApproval
from fedemb.foundation.document import parse
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.pages import collect_reports, tracked_run
from fedemb.reports.mlflow import log_run, settings_of
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

WAITING = {"exit_code": 6, "failed_step": "gate_release", "error": "AwaitingApproval"}


@pytest.fixture(scope="module")
def mlflow():
    found = pytest.importorskip("mlflow", reason="the mlflow package is not installed")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of two runs: one released, one that waits for approval, whose column is hostile."""
    root = tmp_path_factory.mktemp("runs")
    released = honest_run.start(root / "one").until_release()
    policy = {**honest_run.config().policy.model_dump(), "approvals": 2, "policy_id": "two"}
    where = {"data.source.where": {"../../../escaped": ["yes"]}}
    waiting = honest_run.start(root / "two", "tuesday", policy=policy, **where).until_gate()
    with pytest.raises(AwaitingApproval):
        waiting.do_gate()
    for run in (run_folder(released, root / "runs"), run_folder(waiting, root / "runs", **WAITING)):
        collect_reports(run)
    return root / "runs"


def found_in(client, name="glyphs"):
    experiment = client.get_experiment_by_name(name)
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def check(client, runs: Path) -> None:
    found = found_in(client)
    assert set(found) == {"monday", "tuesday"}
    report = RunDirectory.open(runs / "monday").document("privacy_report")
    monday, tuesday = found["monday"], found["tuesday"]
    assert monday.info.status == "FINISHED"
    assert tuesday.info.status == "RUNNING"
    assert monday.data.metrics["epsilon"] == report["accounting"]["epsilon"]
    assert monday.data.metrics["gain"] == pytest.approx(0.2)
    assert monday.data.metrics["gain_low"] == pytest.approx(0.1)
    assert monday.data.metrics["seconds.train_dp_fedemb"] == 1.0
    assert monday.data.params["mechanism.noise_multiplier"] == "2.0"
    assert monday.data.tags["fedemb.headline"] == "Released"
    assert tuesday.data.tags["fedemb.headline"] == "Waiting for approval: 0 of 2 given"
    assert tuesday.data.params["data.source.where..._.._.._escaped"] == '["yes"]'
    names = {item.path for item in client.list_artifacts(monday.info.run_id)}
    assert {f"privacy_report.{end}" for end in ("json", "html")} <= names
    assert {"verdict.json", "privacy_plan.json"} <= names
    path = client.download_artifacts(monday.info.run_id, "privacy_report.json")
    signed = parse(Path(path).read_bytes(), PrivacyReport, "privacy_report")
    assert signed.body.run_id == "monday"
    assert set(monday.data.params) == set(settings_of(RunDirectory.open(runs / "monday").config()))


def test_nothing_that_is_not_public_is_written(runs):
    run = RunDirectory.open(runs / "monday")
    (run.private / "scores").write_text("a figure for every user")
    run.log.write_text("what the steps printed")
    (run.reports / "notes.html").write_text("without a signature")
    found = tracked_run(run)
    assert set(found.artifacts) <= {
        f"{name}.{ending}"
        for name in ("privacy_report", "utility_report", "audit_report", "verdict", "privacy_plan")
        for ending in ("json", "html")
    }
    assert not [name for name in settings_of(found.config) if name.startswith("storage")]
    everything = repr((found.artifacts, settings_of(found.config), found.tags()))
    for word in (str(run.stores()["keys"]), "figure for every user", "what the steps printed"):
        assert word not in everything


def test_document_without_a_valid_signature_is_not_written(runs, tmp_path):
    shutil.copytree(runs / "monday", tmp_path / "monday")
    run = RunDirectory.open(tmp_path / "monday")
    path = run.output("utility_report")
    path.write_bytes(path.read_bytes().replace(b'"monday"', b'"sunday"'))
    found = tracked_run(run)
    assert "recall" not in found.metrics()
    assert not [name for name in found.artifacts if name.startswith("utility_report")]


@pytest.mark.slow
def test_mlflow_server_has_each_run_once(mlflow, runs, tmp_path):
    from tests.kit.servers.mlflow import mlflow_server

    with mlflow_server(tmp_path) as url:
        for _ in range(2):
            for name in ("monday", "tuesday"):
                log_run(tracked_run(RunDirectory.open(runs / name)), url)
        client = mlflow.MlflowClient(url)
        check(client, runs)
