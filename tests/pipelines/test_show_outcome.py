"""The page of a run that was refused: in the public root lies what Kubeflow would throw away."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedemb.outcome
from fedemb.documents.artifacts import Public
from fedemb.outcome import keep_outcome, newest, outcomes, run_folder
from fedemb.reports.figures import privacy_figures, utility_figures
from fedemb.step import declared
from fedemb.storage import LocalStore, open_store
from tests import honest_run

GATE = ("verdict", "verdict_page", "lineage")


class _Bucket(LocalStore):
    """A store that is not this machine's own disk, as far as steps can tell."""

    def __init__(self, root):
        super().__init__(root)
        self.local_root, self.folder = None, root


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """`gs://public` as a folder."""

    def opened(uri):
        name = str(uri).removeprefix("gs://public").strip("/")
        return _Bucket(tmp_path / "bucket" / name)

    monkeypatch.setattr(fedemb.outcome, "open_store", opened)
    return tmp_path / "bucket"


def _pod(folder: Path, task: str, run: str, *outputs: str) -> dict:
    """Artifacts as the launcher hands them to a pod: a local path, an address in the bucket."""
    place = f"gs://public/runs/dp-fedemb/{run}/{task}/0ae1"
    return {
        name: SimpleNamespace(path=str(folder / name), uri=f"{place}/{name}", metadata={})
        for name in outputs
    }


def _run_step(name: str, pod: dict, **values) -> int:
    """Runs a component as its pod does; returns the exit code."""
    try:
        declared(name).component.python_func(**values, **pod)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _show(folder: Path, run: str, state: str) -> tuple[str, dict[str, float]]:
    pod = _pod(folder, "show-outcome", run, "outcome", "metrics", "verdict")
    figures: dict[str, float] = {}
    pod["metrics"].log_metric = figures.__setitem__
    assert _run_step("show_outcome", pod, status=SimpleNamespace(state=state)) == 0
    return (folder / "outcome").read_text(), figures


@pytest.fixture
def denied(tmp_path):
    """An honest run whose report somebody bent."""
    run = honest_run.start(tmp_path / "run").until_gate()
    run.rewrite(run.report, run_id="sunday")
    return run


def _gate(run, pod) -> int:
    given = {
        name: SimpleNamespace(path=str(getattr(run.artifacts, name)), uri="", metadata={})
        for name in declared("gate_release").inputs
    }
    stores = {"ledger": run.ledger_uri, "keys": run.keys_uri}
    config = run.config.model_dump_json()
    return _run_step("gate_release", pod, config=config, **stores, **given)


def test_denied_run_keeps_verdict_and_lineage_and_shows_every_reason(denied, bucket, tmp_path):
    folder = tmp_path / "pod"
    folder.mkdir()
    assert _gate(denied, _pod(folder, "gate-release", "monday", *GATE)) == 3
    kept = bucket / "runs" / "dp-fedemb" / "monday" / "gate-release" / "0ae1"
    verdict = json.loads((kept / "verdict").read_text())
    assert not verdict["allow"]
    assert verdict["reasons"]
    shown = (kept / "verdict_page").read_text()
    assert shown.startswith("# Denied\n")
    assert all(f"- `{reason}`: " in shown for reason in verdict["reasons"])
    assert (kept / "lineage").read_bytes() == (folder / "lineage").read_bytes()
    outcome = json.loads((kept / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["error"]) == (3, "GateDenied")

    report = bucket / "runs" / "dp-fedemb" / "monday" / "account-privacy" / "7" / "privacy_report"
    report.parent.mkdir(parents=True)
    report.write_bytes(denied.report.read_bytes())
    page, figures = _show(folder, "monday", "FAILED")
    assert page.startswith("# Refused\n")
    assert "**gate_release** ended with exit code 3" in page
    assert all(f"- `{reason}`" in page for reason in verdict["reasons"])
    assert figures["exit_code"] == 3
    assert figures["allowed"] == 0
    stated = json.loads(denied.report.read_text())
    assert figures["epsilon"] == stated["accounting"]["epsilon"]
    assert figures["epsilon_cumulative"] == stated["cumulative"]["max_block_epsilon"]
    assert (folder / "verdict").read_bytes() == (kept / "verdict").read_bytes()


def test_allowed_run_has_its_verdict_in_markdown_and_the_figures_runs_are_compared_by(
    bucket, tmp_path
):
    run, folder = honest_run.start(tmp_path / "run").until_gate(), tmp_path / "pod"
    folder.mkdir()
    assert _gate(run, _pod(folder, "gate-release", "friday", *GATE)) == 0
    page = (folder / "verdict_page").read_text()
    assert page.startswith("# Allowed\n")
    assert json.loads((folder / "verdict").read_text())["model_sha"] in page
    stated = json.loads(run.report.read_text())
    measured = json.loads(run.utility.read_text())
    figures = {**privacy_figures(stated), **utility_figures(measured)}
    rate, start = measured["headline_rate"], measured["public_backbone"]
    assert figures == {
        "epsilon": stated["accounting"]["epsilon"],
        "delta": stated["accounting"]["delta"],
        "epsilon_cumulative": stated["cumulative"]["max_block_epsilon"],
        "epsilon_cap": run.config.policy.epsilon_cap,
        "recall": measured["recall_at_far"][rate]["value"],
        "recall_public_start": start["recall_at_far"][rate]["value"],
        "recall_best_start": start["recall_at_far"][rate]["value"],
        "gain": start["difference"][rate]["value"],
    }


def test_figures_of_a_classifier_have_their_own_name_and_none_that_was_not_measured():
    one = {"top_1": {"value": 0.9}, "top_5": {"value": 1.0}}
    start = {"top_1": {"value": 0.5}, "difference": {"value": 0.4}}
    common = {"top_1": {"value": 0.6}, "difference": {"value": 0.3}}
    report = {"model": one, "public_backbone": start, "most_frequent": common}
    starts = {"top_1_public_start": 0.5, "top_1_best_start": 0.6}
    figures = {"top_1": 0.9, "top_5": 1.0, **starts, "gain": 0.3}
    assert utility_figures(report) == figures
    assert utility_figures({"model": None, "public_backbone": None}) == {}
    unmeasured = {"headline_rate": None, "recall_at_far": {}, "public_backbone": None}
    assert utility_figures(unmeasured) == {}
    infinite = {"accounting": {"epsilon": None, "delta": 1e-6}}
    infinite["cumulative"] = {"max_block_epsilon": float("inf"), "cap": 8}
    assert privacy_figures(infinite) == {"delta": 1e-6, "epsilon_cap": 8}


def test_run_without_a_word_from_a_step_says_so(bucket, tmp_path):
    page, figures = _show(tmp_path, "tuesday", "FAILED")
    assert page.startswith("# Stopped; no step reported an error")
    assert figures == {"exit_code": 1}


def test_failure_before_a_retry_that_went_well_is_not_shown(bucket, tmp_path):
    pod = _pod(tmp_path, "gate-release", "friday", "verdict")
    keep_outcome({"verdict": Public}, pod, {"step": "gate_release", "exit_code": 4})
    page, figures = _show(tmp_path, "friday", "SUCCEEDED")
    assert page.startswith("# Done\n")
    assert figures == {"exit_code": 0}


def test_raw_output_is_never_kept(bucket, tmp_path):
    pod = _pod(tmp_path, "train-dp-fedemb", "friday", "diagnostics")
    (tmp_path / "diagnostics").write_text("realised clients")
    keep_outcome({"diagnostics": object}, pod, {"step": "train_dp_fedemb", "exit_code": 3})
    names = open_store(bucket).list()
    assert [Path(name).name for name in names] == ["outcome.json"]


def test_folder_of_a_run_is_found_on_a_cluster_and_on_one_machine():
    cluster = "gs://b/runs/dp-fedemb/1f/show-outcome/9c/outcome"
    assert run_folder(cluster, "show-outcome") == "gs://b/runs/dp-fedemb/1f"
    assert run_folder("/runs/p-1/show-outcome/outcome", "show-outcome") == "/runs/p-1"
    assert list(outcomes("/nowhere/at/all")) == []
    assert newest("/nowhere/at/all", "verdict") is None
