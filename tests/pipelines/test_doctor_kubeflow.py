"""The doctor reads what Kubeflow and Argo do where they themselves read it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedemb.pipelines.compile.cluster import load_profile
from fedemb.pipelines.doctor import kubeflow_parts
from fedemb.pipelines.doctor.doctor import Doctor
from fedemb.pipelines.schedules.kubernetes_api import Answer
from fedemb.pipelines.steps import all_steps, key_claims

HERE = "/api/v1/namespaces/fedemb"
THERE = "/api/v1/namespaces/kubeflow"
RETRIES = json.dumps({"spec": {"templateDefaults": {"retryStrategy": {"limit": 2}}}})


@dataclass
class Objects:
    """A Kubernetes API that holds these objects; tests/cluster asks a real one."""

    held: dict[str, dict] = field(default_factory=dict)
    forbidden: tuple[str, ...] = ()

    def get(self, path: str) -> Answer:
        if any(part in path for part in self.forbidden):
            return Answer(403, {})
        return Answer(200, self.held[path]) if path in self.held else Answer(404, {})


def _repository(endpoint: str, *, archive: bool = True) -> str:
    secret = {"name": "mlpipeline-minio-artifact", "key": "accesskey"}
    return json.dumps(
        {"archiveLogs": archive, "s3": {"endpoint": endpoint, "accessKeySecret": secret}}
    )


def _deployment(*env: dict, env_from: tuple[dict, ...] = ()) -> dict:
    main = {"name": "main", "env": list(env), "envFrom": list(env_from)}
    return {"spec": {"template": {"spec": {"containers": [main]}}}}


def _deployments(name: str) -> str:
    return f"/apis/apps/v1/namespaces/kubeflow/deployments/{name}"


@pytest.fixture
def shipped() -> Objects:
    """Objects as Kubeflow 2.17 makes them in a multi-user installation."""
    annotation = {"workflows.argoproj.io/default-artifact-repository": "default-namespaced"}
    zone = {"configMapKeyRef": {"name": "pipeline-install-config", "key": "cronScheduleTimezone"}}
    return Objects(
        {
            kubeflow_parts.API: {"multi_user": True},
            f"{THERE}/configmaps/workflow-controller-configmap": {
                "data": {
                    "artifactRepository": _repository("controller:9000", archive=False),
                    "executor": '{"securityContext": {"runAsNonRoot": true, "seccompProfile": {}}}',
                    "workflowDefaults": RETRIES,
                }
            },
            f"{HERE}/configmaps/artifact-repositories": {
                "metadata": {"annotations": annotation},
                "data": {"default-namespaced": _repository("seaweedfs.kubeflow:9000")},
            },
            f"{HERE}/secrets/mlpipeline-minio-artifact": {},
            _deployments("ml-pipeline-persistenceagent"): _deployment(
                {"name": "TTL_SECONDS_AFTER_WORKFLOW_FINISH", "value": "86400"}
            ),
            _deployments("ml-pipeline-scheduledworkflow"): _deployment(
                {"name": "CRON_SCHEDULE_TIMEZONE", "valueFrom": zone}
            ),
            f"{THERE}/configmaps/pipeline-install-config": {
                "data": {"cronScheduleTimezone": "UTC"}
            },
        }
    )


def _findings(api: Objects) -> dict[str, tuple[str, str]]:
    doctor = Doctor(api, "fedemb", load_profile("cpu"))
    checks = (kubeflow_parts.multi_user, kubeflow_parts.argo, kubeflow_parts.schedules)
    return {item.check: (item.state, item.what) for check in checks for item in check(doctor)}


def test_all_is_well_as_kubeflow_ships_it_and_each_source_is_named(shipped):
    found = _findings(shipped)
    assert found["log-archive"][0] == "ok"
    assert "seaweedfs.kubeflow:9000" in found["log-archive"][1], "Argo uses the namespace's own"
    assert found["time-to-live"][0] == "ok"
    assert "persistence agent deletes a finished Workflow after 86400 s" in found["time-to-live"][1]
    assert "starts a lost pod again whatever the limit" in found["retry"][1]
    assert found["schedules"] == ("ok", "Kubeflow's scheduler is set to UTC")
    assert found["multi-user"][0] == "ok"


def test_a_missing_secret_of_the_namespaces_repository_is_unsafe(shipped):
    del shipped.held[f"{HERE}/secrets/mlpipeline-minio-artifact"]
    assert _findings(shipped)["log-archive"][0] == "unsafe"


def test_without_a_repository_of_its_own_the_controllers_is_used(shipped):
    del shipped.held[f"{HERE}/configmaps/artifact-repositories"]
    assert _findings(shipped)["log-archive"] == ("ok", "Argo archives no logs")


def test_a_zone_from_a_config_map_is_read(shipped):
    zone = {"data": {"cronScheduleTimezone": "America/New_York"}}
    shipped.held[f"{THERE}/configmaps/pipeline-install-config"] = zone
    assert _findings(shipped)["schedules"][0] == "unsafe"
    assert "America/New_York" in _findings(shipped)["schedules"][1]


@pytest.mark.parametrize(
    ("said", "state"), [("600", "ok"), ("99999999", "ok"), ("soon", "could not tell")]
)
def test_the_shorter_time_to_live_counts(shipped, said, state):
    agent = {"name": "TTL_SECONDS_AFTER_WORKFLOW_FINISH", "value": said}
    shipped.held[_deployments("ml-pipeline-persistenceagent")] = _deployment(agent)
    assert _findings(shipped)["time-to-live"][0] == state
    expected = {"600": "agent deletes a finished Workflow after 600 s", "99999999": "Argo deletes"}
    assert expected.get(said, "is soon") in _findings(shipped)["time-to-live"][1]


def test_a_single_user_installation_is_unsafe(shipped):
    shipped.held[kubeflow_parts.API] = {"multi_user": False}
    assert _findings(shipped)["multi-user"][0] == "unsafe"
    shipped.held[kubeflow_parts.API] = {}
    assert _findings(shipped)["multi-user"][0] == "unsafe", "an absent field is not a yes"


@pytest.mark.parametrize(
    ("value", "state"), [("true", "ok"), ("false", "unsafe"), (None, "unsafe")]
)
def test_where_the_api_cannot_be_asked_its_deployment_is_read(shipped, value, state):
    del shipped.held[kubeflow_parts.API]
    source = {"configMapRef": {"name": "pipeline-api-server-config"}}
    shipped.held[_deployments("ml-pipeline")] = _deployment(env_from=(source,))
    data = {"MULTIUSER": value} if value else {}
    shipped.held[f"{THERE}/configmaps/pipeline-api-server-config"] = {"data": data}
    assert _findings(shipped)["multi-user"][0] == state


@pytest.mark.parametrize(
    ("path", "checks"),
    [
        ("artifact-repositories", {"log-archive"}),
        ("workflow-controller-configmap", {"retry", "executor"}),
        ("ml-pipeline-persistenceagent", {"time-to-live"}),
        ("ml-pipeline-scheduledworkflow", {"schedules"}),
        ("pipeline-install-config", {"schedules"}),
        ("secrets/", {"log-archive"}),
        ("ml-pipeline:8888", {"multi-user"}),
    ],
)
def test_what_may_not_be_read_could_not_be_told(shipped, path, checks):
    shipped.forbidden = (path,)
    found = _findings(shipped)
    assert {check for check, (state, _) in found.items() if state == "could not tell"} == checks


NFS = {"nfs": {"server": "files", "path": "/"}}
DISK = {"csi": {"driver": "pd.csi.storage.gke.io"}}


@pytest.mark.parametrize(
    ("setting", "volume", "state"),
    [
        ("", DISK, "ok"),
        ("", NFS, "unsafe"),
        ("false", {"csi": {"driver": "nfs.csi.k8s.io"}}, "unsafe"),
        ("true", NFS, "ok"),
        ("", None, "could not tell"),
    ],
)
def test_keys_on_nfs_cannot_be_mounted_in_a_user_namespace(shipped, setting, volume, state):
    install = {"data": {"defaultSecurityContextHostUsers": setting}}
    shipped.held[f"{THERE}/configmaps/pipeline-install-config"] = install
    claims = {name for step in all_steps().values() for name in key_claims(step.rights)}
    for name in claims:
        claim = {"spec": {"volumeName": f"pv-{name}"}}
        shipped.held[f"{HERE}/persistentvolumeclaims/{name}"] = claim
        if volume is not None:
            shipped.held[f"/api/v1/persistentvolumes/pv-{name}"] = {"spec": volume}
    s3 = Path(__file__).parents[2] / "infra" / "profiles" / "s3.yaml"
    doctor = Doctor(shipped, "fedemb", load_profile("cpu", s3))
    (finding,) = kubeflow_parts.mapped_volumes(doctor)
    assert finding.state == state
    assert not list(kubeflow_parts.mapped_volumes(Doctor(shipped, "fedemb", load_profile("cpu"))))
