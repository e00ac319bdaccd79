"""Runs in MLflow, read from its server."""

import shutil

import pytest

from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.pages import collect_reports, tracked_run
from fedemb.reports.mlflow import settings_of
from tests.kit.run_folder import run_folder


@pytest.fixture(scope="module")
def folder(released_run, tmp_path_factory):
    run = run_folder(released_run, tmp_path_factory.mktemp("runs"))
    collect_reports(run)
    return run.root


def test_mlflow_gets_only_public_files(folder):
    run = RunDirectory.open(folder)
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


def test_document_without_a_valid_signature_is_not_sent_to_mlflow(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "monday")
    run = RunDirectory.open(tmp_path / "monday")
    path = run.output("utility_report")
    path.write_bytes(path.read_bytes().replace(b'"monday"', b'"sunday"'))
    found = tracked_run(run)
    assert "recall" not in found.metrics()
    assert not [name for name in found.artifacts if name.startswith("utility_report")]
