"""`fedemb gc` on run directories, and the schedule of retention on a cluster."""

import json
from datetime import datetime, timedelta

import pytest
import yaml
from typer.testing import CliRunner

from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.cli.operate import gc
from fedemb.pipelines.compile.cluster import compile_pipeline, parse_images
from fedemb.pipelines.compile.rules import read_compiled, violations
from fedemb.pipelines.retention import RETENTION
from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.run.resume import steps_taken_over
from fedemb.pipelines.schedules import maintenance
from tests.kit.pipeline_runs import honest_run
from tests.kit.schedule_kit import IMAGE

CLUSTER = {
    "storage.private_root": "gs://private",
    "storage.public_root": "gs://public/runs",
    "storage.ledger": "gs://ledger",
    "storage.keys": "gsm://keys/fedemb",
    "storage.releases": "gs://releases",
}


def call(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def later(monkeypatch, days):
    """Lets the command run in so many days."""

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=days)

    monkeypatch.setattr(gc, "datetime", Later)


@pytest.fixture
def run(tmp_path):
    """A run directory whose run is committed and evaluated in a ledger."""
    honest = honest_run.start(tmp_path / "honest").until_gate()
    ledger = honest.ledger()
    from fedemb.keys.signatures import Signer

    signer = Signer.current(honest.keys, "evaluate", ledger.chain.trust)
    ledger.record_evaluation("monday", "0" * 64, signer)
    stores = {"storage.ledger": honest.ledger_uri, "storage.keys": honest.keys_uri}
    made = RunDirectory.create(tmp_path / "runs", "monday", honest.config.updated(stores))
    for name in (
        "private/monday/users/part-0",
        "private/monday/train/attempt-1/checkpoint.npz",
        "public/dp-fedemb-1/train/model/model.json",
        "public/.kfp_cache/1.json",
        "reports/privacy.html",
        "index.html",
        "run.log",
        "releases/glyphs/1/model.json",
        "policy/ledger/trust.json",
    ):
        (made.root / name).parent.mkdir(parents=True, exist_ok=True)
        (made.root / name).write_text("data")
    names = [step for step in ("plan_privacy", "pretrain_public", "reserve_budget")]
    made.write_state(RunState(exit_code=0, seconds=dict.fromkeys(names, 1.0)))
    return made


def files(run):
    return {p.relative_to(run.root).as_posix() for p in run.root.rglob("*") if p.is_file()}


def test_folder_without_runs_is_an_error(run):
    for folder in (run.root, run.root / "nowhere"):
        with pytest.raises(InputError, match="Pass the folder of all runs"):
            call("gc", "--runs", folder)


def test_data_is_only_listed_without_delete(run, monkeypatch):
    before = files(run)
    assert "nothing has expired" in call("gc", "--runs", run.root.parent)
    later(monkeypatch, 31)
    text = call("gc", "--runs", run.root.parent)
    assert "monday/users" in text
    assert "measured, last record 31 days ago" in text
    assert "Nothing was deleted; pass --delete" in text
    assert files(run) == before


@pytest.mark.parametrize("inside", ["public", "private"])
def test_rollback_anchor_inside_a_folder_that_expires_is_refused(run, monkeypatch, inside):
    anchor = {"storage.rollback_anchor": str(run.root / inside / "anchor")}
    run.change_config(run.config().updated(anchor))
    later(monkeypatch, 61)
    before = files(run)
    with pytest.raises(ConfigError, match="overlap"):
        call("gc", "--runs", run.root.parent, "--public-days", 60, "--delete")
    assert files(run) == before


def test_delete_keeps_ledger_releases_and_configuration(run, monkeypatch):
    later(monkeypatch, 61)
    text = call("gc", "--runs", run.root.parent, "--public-days", 60, "--delete")
    assert "deleted 6 objects" in text
    assert files(run) == {
        "config.yaml",
        "state.json",
        "run.log",
        "deleted.json",
        ".lock",
        "releases/glyphs/1/model.json",
        "policy/ledger/trust.json",
    }
    assert set(run.read_deleted()) == {"private", "working", "public"}
    found = json.loads(call("gc", "--runs", run.root.parent, "--public-days", 60, "--json"))
    assert found["found"] == []


def test_resume_of_deleted_data_is_refused_before_anything_runs(run, monkeypatch):
    assert steps_taken_over(run, "partition_users")
    later(monkeypatch, 31)
    call("gc", "--runs", run.root.parent, "--delete")
    with pytest.raises(InputError, match="private data of run monday was deleted by `fedemb gc`"):
        steps_taken_over(run, "partition_users")


def test_running_run_and_run_without_ledger_are_kept(run, monkeypatch, tmp_path):
    other = RunDirectory.create(run.root.parent, "other", honest_run.config())
    (other.root / "private" / "data").write_text("data")
    later(monkeypatch, 400)
    with run.alone():
        text = call("gc", "--runs", run.root.parent, "--delete")
    assert "kept monday: it is running" in text
    assert "kept other: its ledger" in text
    assert (other.root / "private" / "data").exists()
    assert "private/monday/users/part-0" in files(run)


def test_stores_of_a_configuration_are_searched_instead(run, monkeypatch, tmp_path):
    later(monkeypatch, 31)
    config = run.config()
    root = tmp_path / "private"
    (root / "monday" / "users").mkdir(parents=True)
    (root / "monday" / "users" / "part-0").write_text("data")
    path = tmp_path / "mine.yaml"
    tree = config.updated({"storage.private_root": str(root)}).model_dump(mode="json")
    path.write_text(yaml.safe_dump(tree))
    assert "deleted 1 objects" in call("gc", "--config", path, "--delete")
    assert not (root / "monday").exists() or not list((root / "monday").rglob("*.*"))
    assert "private/monday/users/part-0" in files(run), "runs on this machine are not searched"
    with pytest.raises(ConfigError, match="must be set to search stores"):
        call("gc", "--config", "quickstart")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "retention.yaml"
    compile_pipeline(path, profile="cpu", images=parse_images([IMAGE]), pipeline=RETENTION)
    return path


def test_compiled_pipeline_keeps_the_rules_and_lists_by_default(package):
    spec, platform = read_compiled(package)
    assert violations([spec, platform]) == []
    assert list(spec["root"]["dag"]["tasks"]) == ["delete-expired"]
    inputs = spec["root"]["inputDefinitions"]["parameters"]
    assert set(inputs) == set(RETENTION.parameters)
    assert inputs["dry_run"]["defaultValue"] is True
    labels = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    (executor,) = labels.values()
    assert executor["podMetadata"]["labels"]["fedemb.dev/step"] == "delete-expired"


def test_a_pipeline_that_trains_still_needs_its_release_step(package):
    spec, platform = read_compiled(package)
    text = yaml.safe_dump([spec, platform]).replace("delete_expired", "train_dp_fedemb")
    assert [p for p in violations(yaml.safe_load(text)) if "no release-model step" in p]


def schedule(kfp, package, tmp_path, *words):
    path = tmp_path / "run.yaml"
    tree = honest_run.config().updated(CLUSTER).model_dump(mode="json")
    path.write_text(yaml.safe_dump(tree))
    return call(
        *("schedule", "retention", package, "--config", path, "--host", kfp.url),
        *("--namespace", "team-a", *words),
    )


def test_schedule_is_created_once_and_replaced_when_it_differs(kfp, package, tmp_path):
    first = schedule(kfp, package, tmp_path)
    assert "only list expired data" in first
    assert "already scheduled" in schedule(kfp, package, tmp_path)
    (made,) = kfp.recurring.values()
    assert made["display_name"] == maintenance.NAME.format("retention")
    given = made["runtime_config"]["parameters"]
    assert given["dry_run"] is True
    assert given["private_root"] == "gs://private"
    text = schedule(kfp, package, tmp_path, "--delete", "--private-days", 14)
    assert "replaced recurring run" in text
    (made,) = kfp.recurring.values()
    given = made["runtime_config"]["parameters"]
    assert given["dry_run"] is False
    assert json.loads(given["retention"])["private_days"] == 14


def test_schedule_refuses_overlapping_stores_and_other_packages(kfp, package, tmp_path):
    with pytest.raises(ConfigError, match="overlap"):
        schedule(kfp, package, tmp_path, "--set", "storage.ledger=gs://private/ledger")
    other = tmp_path / "other.yaml"
    compile_pipeline(other, profile="cpu", images=parse_images([IMAGE]))
    with pytest.raises(ConfigError, match="is the pipeline dp-fedemb"):
        schedule(kfp, other, tmp_path)
    assert not kfp.recurring
