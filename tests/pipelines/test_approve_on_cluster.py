"""Approval on a cluster: one command reads the run from Kubeflow, signs, and starts the release."""

import json
from pathlib import Path

import pytest
import yaml

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import ArtifactError, AwaitingApproval, ConfigError
from fedemb.foundation.document import read
from tests.kit.cli import fedemb, ssh_key
from tests.kit.kubeflow_run import KubeflowRun
from tests.kit.pipeline_runs import honest_run


class World:
    """A run that a cluster left waiting, in Kubeflow and in the public root."""

    def __init__(self, root: Path, kfp, package: Path, **changes):
        self.root, self.kfp = root, kfp
        policy = {**honest_run.config().policy.model_dump(), "approvals": 2}
        changes = {"policy": policy, "release.approval_hours": 2.0, **changes}
        self.run = honest_run.start(root / "run", **changes).until_gate()
        self.keys = {who: ssh_key(root, who) for who in ("ada", "bob")}
        self.decide(AwaitingApproval)
        self._submit(package)

    def decide(self, refused: type[Exception] | None = None) -> None:
        """Runs the gate, and publishes what the run has then."""
        if refused is None:
            self.run.do_gate()
        else:
            with pytest.raises(refused):
                self.run.do_gate()
        KubeflowRun(self.root, self.run).upload()

    def _submit(self, package: Path) -> None:
        stores = {
            "private_root": str(self.root / "private"),
            "public_root": str(self.root / "public"),
            "ledger": self.run.ledger_uri,
            "keys": self.run.keys_uri,
            "releases": self.run.releases_uri,
        }
        settings = {f"storage.{name}": uri for name, uri in stores.items()}
        config = self.run.config.updated({"data.source.uri": "gs://images/*.parquet", **settings})
        path = self.root / "run.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self.call("submit", package, "--config", path)
        ((first, made),) = self.kfp.runs.items()
        del self.kfp.runs[first]
        self.kfp.runs["monday"] = {**made, "run_id": "monday", "state": "FAILED"}
        self.kfp.workflows.clear()

    def name_approvers(self) -> None:
        public = {who: Path(f"{path}.pub") for who, path in self.keys.items()}
        named = [f"{who}={path}" for who, path in public.items()]
        stores = ("--ledger", self.run.ledger_uri, "--keys", self.run.keys_uri)
        self.call("ledger", "approvers", *named, *stores, "--reason", "the board", host=False)

    def call(self, *words, host: bool = True) -> str:
        at = ("--host", self.kfp.url) if host else ()
        return fedemb(*words, *at)

    def approve(self, who: str, run_id: str = "monday", *more) -> str:
        return self.call("approve", run_id, "--key", self.keys[who], "--yes", *more)

    def later_runs(self) -> list[dict]:
        return [run for run in self.kfp.runs.values() if run["run_id"] != "monday"]


@pytest.fixture(autouse=True)
def skip_cluster_check(monkeypatch):
    """Other tests check the cluster itself."""
    monkeypatch.setenv("KFP_NAMESPACE", "team-a")
    for module in ("cluster", "approve"):
        monkeypatch.setattr(f"fedemb.pipelines.cli.{module}.check_cluster_first", lambda *_: None)


@pytest.fixture
def world(tmp_path, kfp, package):
    made = World(tmp_path, kfp, package)
    made.name_approvers()
    return made


def tasks(world, run):
    version = run["pipeline_version_reference"]["pipeline_version_id"]
    spec = next(yaml.safe_load_all(world.kfp.versions[version]["_content"]))
    return spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]


def test_last_approval_starts_only_gate_and_release(world):
    first = world.approve("ada")
    assert "after your signature: still waiting, 1 of 2 approvals" in first
    assert world.later_runs() == []
    last = world.approve("bob")
    assert "after your signature: the gate allows the release" in last
    (made,) = world.later_runs()
    assert f"release: run {made['run_id']} decides again from gate_release" in last
    found = tasks(world, made)
    assert {name for name in found if not name.startswith("import-")} == {
        "gate-release",
        "release-model",
    }
    assert found["gate-release"]["inputs"]["parameters"]["ledger"]
    place = found["import-account-privacy-privacy-report"]["inputs"]["parameters"]["uri"]
    report = Path(place["runtimeValue"]["constant"])
    assert read(report, PrivacyReport).sha == read(world.run.report, PrivacyReport).sha
    stored, arguments = world.kfp.runs["monday"], made["runtime_config"]["parameters"]
    assert arguments == stored["runtime_config"]["parameters"]
    assert made["display_name"].endswith("(resumes monday)")
    world.decide()
    world.run.do_release()
    assert world.run.problems() == []


@pytest.mark.long
def test_repeated_approval_signs_and_starts_nothing_twice(world):
    world.approve("ada")
    world.approve("bob")
    head = world.run.ledger().head
    again = world.approve("bob")
    assert "is already PENDING" in again
    assert world.run.ledger().head == head
    assert len(world.later_runs()) == 1
    (made,) = world.later_runs()
    by_later = world.approve("ada", made["run_id"])  # the id of the release run is understood
    assert "is already PENDING" in by_later
    made["state"] = "SUCCEEDED"
    assert f"run {made['run_id']} released this model" in world.approve("ada")
    assert len(world.later_runs()) == 1


def test_changed_report_in_the_public_root_is_refused(world):
    path = world.root / "public/fedemb/monday/account-privacy/1/privacy_report"
    tree = json.loads(path.read_text())
    tree["accounting"]["epsilon"] = 0.01
    path.write_text(json.dumps(tree, sort_keys=True, separators=(",", ":")))
    with pytest.raises(ArtifactError):
        world.approve("ada")
    assert world.run.ledger().state.decisions == []


def test_profile_that_pins_packages_needs_the_file(world, package, tmp_path):
    profile = tmp_path / "pinned.yaml"
    profile.write_text(yaml.safe_dump({"packages": ["0" * 64]}))
    words = ("--profile", "cpu", "--profile", profile)
    with pytest.raises(ConfigError, match="--package"):
        world.approve("ada", "monday", *words)
    with pytest.raises(ConfigError, match="does not list"):
        world.approve("ada", "monday", *words, "--package", package)
    assert world.run.ledger().state.decisions == []
    assert "1 of 2" in world.approve("ada", "monday", "--package", package)
