"""`fedemb submit` at a Kubeflow that fails as the real one does: one charged run, and the truth."""

import json
import re
import socket

import pytest
import yaml
from typer.testing import CliRunner

from fedemb.errors import ConfigError, StorageError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.cluster import kubeflow, submission
from fedemb.pipelines.cluster.package import check_package, fitted
from fedemb.pipelines.cluster.rules import RULES, no_raw_outputs
from fedemb.pipelines.cluster.schedule import load_schedule
from fedemb.pipelines.cluster.submission import KEY_LABEL
from fedemb.pipelines.run.load_config import load_config
from fedemb.pipelines.steps import PIPELINE
from tests.kit.schedule_kit import change_schedule
from tests.kit.servers.kfp_stand_in import LONGEST, Fault


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(submission, "WAITS", (0.0, 0.0))


@pytest.fixture(autouse=True)
def skip_cluster_check(monkeypatch):
    """Other tests check the cluster itself."""
    monkeypatch.setattr("fedemb.pipelines.cli.cluster.check_cluster_first", lambda *_: None)


@pytest.fixture
def config(folder):
    """File of the configuration of the example schedule."""
    path = folder / "run.yml"
    loaded = load_schedule(folder / "weekly.yaml").config
    path.write_text(yaml.safe_dump(loaded.model_dump(mode="json")))
    return path


@pytest.fixture
def submit(kfp, package, config):
    """Runs the command; returns its result."""

    def run(*more: str):
        return CliRunner().invoke(
            app,
            ["submit", str(package), "--config", str(config), "--host", kfp.url, *more],
            env={"KFP_NAMESPACE": "team-a"},
        )

    return run


def _run_of(result) -> str:
    assert result.exception is None, result.exception
    return result.stdout.split()[-1]


@pytest.mark.parametrize(
    "letter", ["a", "\u00e9", "\U0001f512"], ids=["1 byte", "2 bytes", "4 bytes"]
)
def test_long_texts_are_truncated_by_bytes_and_stay_distinct(letter):
    text = letter * (1024 // len(letter.encode()) // 4 + 1)
    assert len(fitted(text).encode()) <= LONGEST
    assert fitted(text + "1") != fitted(text + "2")
    assert fitted("short") == "short"


def test_a_second_submit_starts_no_second_run_while_the_first_may_be_alive(submit, kfp):
    first = _run_of(submit())
    for state in ("PENDING", "RUNNING", "PAUSED", "CANCELING", "RUNTIME_STATE_UNSPECIFIED"):
        kfp.runs[first]["state"] = state
        second = submit()
        assert _run_of(second) == first
        assert "nothing started" in second.stderr
    assert len(kfp.runs) == 1


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELED"])
def test_after_the_first_run_ended_a_second_has_another_name(submit, kfp, state):
    first = _run_of(submit())
    kfp.runs[first]["state"] = state
    second = submit()
    assert _run_of(second) != first
    assert f"earlier run {first} of this configuration: {state}" in second.stderr
    names = [run["display_name"] for run in kfp.runs.values()]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"glyphs-2027 glyphs [0-9a-f]{16}-[12]", n) for n in names)
    assert len(kfp.versions) == 1


def test_other_configuration_or_again_starts_a_run(submit, kfp):
    _run_of(submit())
    _run_of(submit("--set", "training.seed=7"))
    assert len(kfp.runs) == 2
    _run_of(submit("--again"))
    assert len(kfp.runs) == 3


def test_submit_that_loses_an_upload_race_asks_to_run_again(submit, kfp, monkeypatch):
    _run_of(submit())
    monkeypatch.setattr("fedemb.pipelines.cluster.kubeflow.Kubeflow._versions", lambda *_: {})
    assert "Run the command again" in str(submit("--again").exception), "uploaded in between"
    assert len(kfp.runs) == 1


def test_pods_and_version_have_the_key_as_a_label(submit, kfp):
    name = kfp.runs[_run_of(submit())]["display_name"]
    key = re.search("([0-9a-f]{16})-1", name)[1]
    (version,) = kfp.versions.values()
    assert version["display_name"].endswith(f"-{key}")
    spec, platform = yaml.safe_load_all(version["_content"])
    options = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    labels = [
        options[name]["podMetadata"]["labels"] for name in spec["deploymentSpec"]["executors"]
    ]
    assert {each[KEY_LABEL] for each in labels} == {key}


class Everywhere:
    """A fault at each call of a submission in turn."""

    def __init__(self, kfp, submit, **fault):
        self.kfp, self.submit, self.fault = kfp, submit, fault

    def __iter__(self):
        for at in range(1, 40):
            for state in (self.kfp.pipelines, self.kfp.versions, self.kfp.experiments):
                state.clear()
            self.kfp.runs.clear()
            self.kfp.workflows.clear()
            self.kfp.fault = Fault(at, **self.fault)
            result = self.submit()
            unused, self.kfp.fault = self.kfp.fault.at > 0, None
            yield at, result
            if unused:
                return


FAULTS = {
    "503": {},
    "connection lost": {"cut": True},
    "503, carried out": {"carried_out": True},
    "answer lost": {"carried_out": True, "cut": True},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "readable"),
    [
        ("503", False),
        ("503, carried out", False),
        ("answer lost", False),
        ("connection lost", True),
        ("503, carried out", True),
    ],
)
def test_two_submissions_with_a_failed_call_start_one_run(request, kfp, submit, fault, readable):
    if readable:
        request.getfixturevalue("cluster")
    failed = 0
    for at, result in Everywhere(kfp, submit, **FAULTS[fault]):
        failed += result.exception is not None
        assert result.exception is None or isinstance(result.exception, StorageError), at
        again = submit()
        if again.exception is not None:
            assert not readable
            assert "pass --again" in str(again.exception)
        assert len(kfp.workflows) <= 1, f"call {at} led to two runs"
    assert failed >= 3


@pytest.fixture
def reject_run_rows(kfp, monkeypatch):
    """The database refuses the row, as it does where a text is too long for its column."""
    monkeypatch.setattr("tests.kit.servers.kfp_stand_in.LONGEST", 10)


def test_failed_submit_with_a_live_workflow_is_not_repeated(submit, cluster, reject_run_rows):
    first = submit()
    (workflow,) = cluster.workflows
    name = workflow["metadata"]["name"]
    assert isinstance(first.exception, StorageError)
    assert first.exception.exit_code == 4
    for said in (f"Workflow {name}", "may be charged", f"delete workflow {name}", "answered 500"):
        assert said in str(first.exception)
    assert "role of the account" not in str(first.exception)
    second = submit()
    assert f"Workflow {name}" in str(second.exception)
    assert len(cluster.workflows) == 1
    workflow["status"]["phase"] = "Failed"
    submit()
    assert len(cluster.workflows) == 2
    names = {
        w["metadata"]["annotations"]["pipelines.kubeflow.org/run_name"] for w in cluster.workflows
    }
    assert len(names) == 2


@pytest.mark.parametrize("status", [403, None], ids=["forbidden", "no cluster"])
def test_second_submit_with_unreadable_workflows_needs_again(
    request, submit, kfp, reject_run_rows, status
):
    if status is not None:
        request.getfixturevalue("cluster").cluster_status = status
    first = str(submit().exception)
    assert "is unknown" in first
    assert re.search(rf"get pods -l {KEY_LABEL}=[0-9a-f]{{16}}`", first)
    assert "pass --again" in str(submit().exception)
    assert len(kfp.workflows) == 1
    submit("--again")
    assert len(kfp.workflows) == 2


def test_a_single_user_installation_is_refused(submit, kfp, folder):
    kfp.multi_user = False
    assert isinstance(submit().exception, ConfigError)
    assert "single-user" in str(submit().exception)
    result = CliRunner().invoke(app, ["schedule", str(folder), "--host", kfp.url])
    assert "single-user" in str(result.exception)
    assert kfp.calls == []


def test_deleted_workflow_does_not_block_submission(submit, cluster):
    first = _run_of(submit())
    cluster.runs[first]["state"] = ""
    assert submit().exit_code == 0, "its Workflow is there"
    cluster.workflows.clear()
    assert "its Workflow was deleted" in str(submit().exception)
    assert _run_of(submit("--again")) != first


def test_submit_sends_what_the_schedule_would(submit, kfp, folder, package):
    loaded = load_schedule(folder / "weekly.yaml")
    run = kfp.runs[_run_of(submit("--experiment", "glyphs"))]
    assert run["runtime_config"]["parameters"] == loaded.arguments
    assert run["service_account"] == "fedemb-run"
    assert "enable_caching" not in json.dumps(run)
    (filed,) = kfp.experiments.values()
    assert filed["display_name"] == "glyphs"
    assert "storage.keys" in str(submit("--set", "storage.keys=null").exception)
    assert len(kfp.runs) == 1


def test_mlflow_address_is_a_run_argument_and_not_part_of_the_run_key(submit, kfp, folder, package):
    """The same configuration is not trained and charged again for another tracking server."""
    run = kfp.runs[_run_of(submit("--mlflow", "https://mlflow.example"))]
    assert run["runtime_config"]["parameters"]["mlflow"] == "https://mlflow.example"
    again = submit("--mlflow", "https://other.example")
    assert "nothing started" in again.stderr
    spec = next(yaml.safe_load_all(package.read_text()))
    task = spec["root"]["dag"]["tasks"]["show-outcome"]["inputs"]["parameters"]
    assert task["mlflow"] == {"componentInputParameter": "mlflow"}
    change_schedule(folder, "weekly", mlflow="https://mlflow.example")
    loaded = load_schedule(folder / "weekly.yaml")
    assert loaded.arguments["mlflow"] == "https://mlflow.example"


def test_a_package_of_another_pipeline_is_refused(kfp, package, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(package.read_text().replace("\n  name: fedemb\n", "\n  name: another\n"))
    with pytest.raises(ConfigError, match=r"is the pipeline another\. Run `fedemb compile`"):
        check_package(other, config=load_config("quickstart", []))


def test_resumed_submission_uses_the_run_id_of_the_crashed_run(submit, kfp):
    run = kfp.runs[_run_of(submit("--resume", "crashed-1"))]
    assert run["display_name"].endswith("(resumes crashed-1)")
    (filed,) = kfp.experiments.values()
    assert filed["display_name"] == "fedemb", "the pipeline's name, where none was given"
    (version,) = kfp.versions.values()
    text = version["_content"].decode()
    assert "pipeline_job_uuid" not in text
    spec = next(yaml.safe_load_all(text))
    ids = {
        name: task["inputs"]["parameters"]["run_id"]["runtimeValue"]["constant"]
        for name, task in spec["components"]["comp-exit-handler-1"]["dag"]["tasks"].items()
        if "run_id" in task["inputs"].get("parameters", {})
    }
    assert set(ids.values()) == {"crashed-1"}
    assert {"reserve-budget", "partition-users", "train-model"} <= set(ids)
    assert "not a run id" in str(submit("--resume", "'; drop").exception)


@pytest.fixture
def old_root(tmp_path, config):
    """Public root of an earlier run that came to the gate; returns the root."""
    root = tmp_path / "public"
    tree = yaml.safe_load(config.read_text())
    tree["storage"]["public_root"] = str(root)
    config.write_text(yaml.safe_dump(tree))
    for name in _files_before_release():
        path = root / "fedemb" / "earlier" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return root


def _files_before_release() -> list[str]:
    """Every artifact of the steps before the release, as Kubeflow names them."""
    steps = PIPELINE.declared()[: PIPELINE.steps.index("release_model")]
    return [f"{step.slug}/e/{name}" for step in steps for name in step.files]


def _tasks(version: dict) -> dict:
    spec = next(yaml.safe_load_all(version["_content"]))
    return spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]


def test_submission_from_a_step_imports_the_outputs_of_earlier_steps(submit, kfp, old_root):
    where = ("--resume", "earlier", "--from", "account_privacy")
    _run_of(submit(*where))
    (version,) = kfp.versions.values()
    tasks = _tasks(version)
    ours = {name for name in tasks if not name.startswith("import-")}
    assert ours == {"account-privacy", "gate-release", "release-model"}
    for task in tasks.values():
        for value in task.get("inputs", {}).get("artifacts", {}).values():
            assert value["taskOutputArtifact"]["producerTask"] in tasks
        assert set(task.get("dependentTasks", [])) <= set(tasks)
    address = tasks["import-train-model-model"]["inputs"]["parameters"]["uri"]
    earlier = f"{old_root}/fedemb/earlier"
    assert address["runtimeValue"]["constant"] == f"{earlier}/train-model/e/model"
    spec, platform = yaml.safe_load_all(version["_content"])
    # An importer is not a step, so the rule does not know the kind of its output.
    assert [rule for rule in RULES if any(rule(spec, platform))] == [no_raw_outputs]
    shown = spec["root"]["dag"]["tasks"]["show-outcome"]["inputs"]["parameters"]["reused"]
    reused = json.loads(shown["runtimeValue"]["constant"])
    assert reused["utility_report"] == f"{earlier}/evaluate-model/e/utility_report"
    assert "privacy_report" not in reused, "this run writes its own"
    given = tasks["account-privacy"]["inputs"]["parameters"]["config"]["runtimeValue"]["constant"]
    assert json.loads(given)["policy"]["policy_id"] == "glyphs-2027"
    again = submit(*where)
    assert "nothing started" in again.stderr
    (run,) = kfp.runs.values()
    run["state"] = "FAILED"
    (old_root / "fedemb" / "earlier").rename(old_root / "fedemb" / run["run_id"])
    _run_of(submit(*where))
    _, later = kfp.versions.values()
    address = _tasks(later)["import-train-model-model"]["inputs"]["parameters"]["uri"]
    assert f"/{run['run_id']}/" in address["runtimeValue"]["constant"], "of the newest run"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", "account_privacy"), "--resume"),
        (("--resume", "earlier", "--from", "release_model"), "be resumed from release_model"),
        (("--resume", "earlier", "--from", "nothing"), "cannot be resumed from nothing"),
        (("--resume", "another", "--from", "account_privacy"), "were not found"),
    ],
)
def test_invalid_resume_of_a_submission_is_refused(submit, kfp, old_root, arguments, said):
    result = submit(*arguments)
    assert said in str(result.exception)
    assert kfp.runs == {}


def test_resume_with_two_executions_of_a_step_is_refused(submit, kfp, old_root):
    other = old_root / "fedemb" / "earlier" / "reserve-budget" / "f" / "reservation"
    other.parent.mkdir()
    other.write_text("{}")
    where = ("--resume", "earlier", "--from", "account_privacy")
    assert "2 executions" in str(submit(*where).exception)


def test_unresponsive_api_times_out(monkeypatch):
    monkeypatch.setattr(kubeflow, "TIMEOUT", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(StorageError, match="does not answer"),
    ):
        kubeflow.Kubeflow(f"http://127.0.0.1:{silent.getsockname()[1]}", "team-a")
