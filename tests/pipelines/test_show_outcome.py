"""The first page of a run in Kubeflow: from its documents, and from what failed steps kept."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedemb.runtime.step_context
import fedemb.steps.show_outcome
from fedemb.documents.artifacts import Public
from fedemb.errors import Superseded
from fedemb.runtime.step import declared, step_process
from fedemb.runtime.step_context import keep_outcome
from fedemb.storage import LocalStore, open_store
from fedemb.storage.fencing import FencingToken
from tests.kit.pipeline_runs import honest_run

GATE = ("verdict", "verdict_page", "lineage")


def test_newest_verdict_is_that_of_the_longest_ledger():
    def verdict(sequence, allow):
        return SimpleNamespace(body=SimpleNamespace(ledger_sequence=sequence, allow=allow))

    unread, earlier = verdict(None, False), verdict(4, True)
    denied, allowed = verdict(5, False), verdict(5, True)
    newest = fedemb.steps.show_outcome.newest_verdict
    assert newest([denied, unread, earlier]) is denied
    assert newest([allowed, denied]) is newest([denied, allowed]) is allowed
    assert newest([]) is None


class _Bucket(LocalStore):
    """A store that is not this machine's own disk, as far as steps can tell."""

    def __init__(self, root):
        super().__init__(root)
        self.local_root, self.folder = None, root


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """`gs://public` as a folder."""

    def opened(uri):
        _, public, name = str(uri).partition("gs://public")
        return _Bucket(tmp_path / "bucket" / name.strip("/")) if public else open_store(uri)

    for module in (fedemb.runtime.step_context, fedemb.steps.show_outcome):
        monkeypatch.setattr(module, "open_store", opened)
    return tmp_path / "bucket"


def _pod(folder: Path, task: str, run: str, *outputs: str) -> dict:
    """Artifacts as the launcher hands them to a pod: a local path, an address in the bucket."""
    place = f"gs://public/runs/fedemb/{run}/{task}/0ae1"
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


def _show(folder: Path, run: str, state: str, **parameters) -> tuple[str, dict[str, float]]:
    pod = _pod(folder, "show-outcome", run, "outcome", "summary", "metrics", "verdict")
    figures: dict[str, float] = {}
    pod["metrics"].log_metric = figures.__setitem__
    given = dict.fromkeys(declared("show_outcome").parameters, "")  # no valid configuration
    given |= {"run_id": run, "reused": "{}", "seed": 0, **parameters}
    assert _run_step("show_outcome", pod, status=SimpleNamespace(state=state), **given) == 0
    assert {type(value) for value in figures.values()} <= {float}, "one number for each metric"
    html, short = ((folder / name).read_text() for name in ("outcome", "summary"))
    assert re.search(r"<h1>(.*?)</h1>", html)[1] == short.partition("\n")[0].removeprefix("# ")
    return short, figures


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
    kept = bucket / "runs" / "fedemb" / "monday" / "gate-release" / "0ae1"
    verdict = json.loads((kept / "verdict").read_text())
    assert not verdict["allow"]
    assert verdict["reasons"]
    shown = (kept / "verdict_page").read_text()
    assert shown.startswith("# Denied\n")
    assert all(f"- `{reason}`: " in shown for reason in verdict["reasons"])
    assert (kept / "lineage").read_bytes() == (folder / "lineage").read_bytes()
    outcome = json.loads((kept / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["error"]) == (3, "GateDenied")

    report = bucket / "runs" / "fedemb" / "monday" / "account-privacy" / "7" / "privacy_report"
    report.parent.mkdir(parents=True)
    report.write_bytes(denied.report.read_bytes())
    page, figures = _show(folder, "monday", "FAILED")
    assert verdict["reasons"] == ["report_differs"]
    assert page.startswith("# Refused: report differs\n")
    assert "**gate_release** ended with exit code 3" in page
    assert all(f"- `{reason}`" in page for reason in verdict["reasons"])
    assert figures["exit_code"] == 3
    assert figures["allowed"] == 0
    stated = json.loads(denied.report.read_text())
    assert figures["epsilon"] == stated["accounting"]["epsilon"]
    assert figures["epsilon_cumulative"] == stated["cumulative"]["max_block_epsilon"]
    assert (folder / "verdict").read_bytes() == (kept / "verdict").read_bytes()


def test_run_resumed_from_the_gate_shows_the_figures_of_the_run_before(bucket, released, tmp_path):
    """`submit --from gate_release`: the reports are in the folder of the earlier run."""
    earlier = bucket / "runs" / "fedemb" / "monday"
    later = bucket / "runs" / "fedemb" / "tuesday"
    later.mkdir()
    for task in ("gate-release", "release-model"):
        (earlier / task).rename(later / task)
    place = "gs://public/runs/fedemb/monday"
    addresses = {
        "privacy_report": f"{place}/account-privacy/1bf2/privacy_report",
        "privacy_page": f"{place}/account-privacy/1bf2/privacy_page",
        "utility_report": f"{place}/evaluate-model/1bf2/utility_report",
    }
    page, figures = _show(tmp_path, "tuesday", "COMPLETE", reused=json.dumps(addresses))
    assert page.startswith("# Released\n")
    stated = json.loads(released.report.read_text())
    assert figures["epsilon"] == stated["accounting"]["epsilon"]
    assert figures["gain"] == pytest.approx(0.2)
    assert "monday/account-privacy/1bf2/privacy_page" in (tmp_path / "outcome").read_text()


def _upload(bucket: Path, run: str, task: str, **files: Path) -> Path:
    """What the launcher does after a step that succeeded."""
    place = bucket / "runs" / "fedemb" / run / task / "1bf2"
    place.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        (place / name).write_bytes(path.read_bytes())
    return place


@pytest.fixture
def released(bucket, released_run):
    """A run that was released, with its documents in the bucket."""
    run, root = released_run, released_run.root
    pages = {"privacy_page": run.page, "privacy_report": run.report}
    _upload(bucket, "monday", "account-privacy", **pages)
    _upload(bucket, "monday", "evaluate-model", utility_report=run.utility)
    gate = {"verdict": run.verdict, "verdict_page": root / "verdict.md", "lineage": run.lineage}
    _upload(bucket, "monday", "gate-release", **gate)
    _upload(bucket, "monday", "release-model", release=root / "release.json")
    return run


def _fail_after_taking_tokens(*stores: str) -> None:
    for store in stores:
        FencingToken(store, "train_model")
    raise OSError("the disk is full")


def test_superseded_process_writes_no_outcome(released, bucket, tmp_path):
    """A pod that was lost and started again: the first process ends after the second."""
    pod = _pod(tmp_path, "train-model", "monday", "model")
    with pytest.raises(SystemExit) as ended, step_process("train_model", pod):
        raise Superseded("started again; no action needed")
    assert ended.value.code == 3
    turns = str(tmp_path / "private")
    with pytest.raises(SystemExit), step_process("train_model", pod):
        _fail_after_taking_tokens(turns, turns)  # the second one is another process's
    assert not list(bucket.rglob("outcome.json"))
    page, figures = _show(tmp_path, "monday", "FAILED")
    assert page.startswith("# Released\n")
    assert figures["exit_code"] == 0


def test_holder_of_the_fencing_token_writes_its_outcome(bucket, tmp_path):
    pod = _pod(tmp_path, "train-model", "monday", "model")
    turns = str(tmp_path / "private")
    with pytest.raises(SystemExit), step_process("train_model", pod):
        _fail_after_taking_tokens(turns, str(tmp_path / "elsewhere"))
    (kept,) = bucket.rglob("outcome.json")
    assert json.loads(kept.read_text())["fencing_token"] == 1


def test_failure_with_the_highest_fencing_token_is_shown(bucket, tmp_path):
    for place, token, code in (("a", 2, 4), ("b", 1, 3)):
        uri = f"gs://public/runs/fedemb/monday/train-model/{place}/model"
        pod = {"model": SimpleNamespace(path=str(tmp_path / "none"), uri=uri, metadata={})}
        outcome = {"step": "train_model", "exit_code": code, "error": "StorageError"}
        keep_outcome({"model": Public}, pod, {**outcome, "message": "", "fencing_token": token})
    page, figures = _show(tmp_path, "monday", "FAILED")
    assert page.startswith("# Stopped: train_model, a store could not be reached\n")
    assert figures == {"exit_code": 4}


def test_raw_output_is_never_kept(bucket, tmp_path):
    pod = _pod(tmp_path, "train-model", "friday", "diagnostics")
    (tmp_path / "diagnostics").write_text("realised clients")
    keep_outcome({"diagnostics": object}, pod, {"step": "train_model", "exit_code": 3})
    names = open_store(bucket).list()
    assert [Path(name).name for name in names] == ["outcome.json"]
