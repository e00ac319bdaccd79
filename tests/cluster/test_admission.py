"""Who gets which pod past a real API server: every honest one, no thief."""

from __future__ import annotations

import copy

import pytest
import yaml
from conftest import CONTROLLER, INFRA, page_block
from pods import SYSTEM, compiled, plain

from fedemb.pipelines.steps import KIND_CLAIMS

GROUPS = yaml.safe_load((INFRA / "rights.yaml").read_text())["groups"]
GROUP_OF = {rights["step"].replace("_", "-"): group for group, rights in GROUPS.items()}
CLAIMS = {
    item["metadata"]["name"]
    for item in yaml.safe_load_all((INFRA / "kustomize/overlays/s3/keys.yaml").read_text())
    if item["kind"] == "PersistentVolumeClaim"
}
ALICE = "alice@example.org"


@pytest.fixture(scope="module")
def steps(overlay, tmp_path_factory):
    """Profile -> step of any pipeline -> its pod, compiled for this overlay."""
    over = [] if overlay == "gke" else [INFRA / "profiles" / "s3.yaml"]
    token = tmp_path_factory.mktemp("profile") / "mlflow.yaml"  # as the cluster reference says
    token.write_text("steps: {show_outcome: {secrets: [{name: mlflow-token, keys: {a: B}}]}}")
    over.append(token)
    return {
        profile: compiled(tmp_path_factory.mktemp("compiled"), profile, *over)
        for profile in ("cpu", "gpu", "tpu")
    }


@pytest.mark.parametrize("profile", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("step", GROUP_OF)
def test_each_step_pod_is_admitted_hardened_with_its_service_account(ask, steps, profile, step):
    """Within the quota too: each asks for what its profile says."""
    assert set(steps[profile]) == set(GROUP_OF)
    answer = ask.pod(steps[profile][step], CONTROLLER)
    assert answer.taken, answer.message
    assert answer.warnings == []
    spec = answer.body["spec"]
    assert spec["serviceAccountName"] == f"fedemb-{GROUP_OF[step]}"
    assert spec["securityContext"]["fsGroup"] == 65532
    (main,) = [container for container in spec["containers"] if container["name"] == "main"]
    assert main["securityContext"]["readOnlyRootFilesystem"] is True
    assert main["securityContext"]["runAsNonRoot"] is True
    assert "/tmp" in {mount["mountPath"] for mount in main["volumeMounts"]}


def test_the_driver_runs_on_the_account_of_the_run(ask, overlay):
    answer = ask.pod(plain("fedemb-run"), CONTROLLER)
    assert answer.taken, answer.message
    assert answer.body["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "100m"


def _ways_to_a_secret(name: str) -> dict[str, dict]:
    """Everything in a pod that can name a secret."""
    key = {"secretKeyRef": {"name": name, "key": "secret_key"}}
    projected = {"sources": [{"secret": {"name": name}}]}
    csi = {"driver": "any.example", "nodePublishSecretRef": {"name": name}}
    first = plain(container={"env": [{"name": "A", "valueFrom": key}]})
    init = plain()
    init["spec"]["initContainers"] = copy.deepcopy(first["spec"]["containers"])
    init["spec"]["initContainers"][0]["name"] = "init"
    return {
        "env": first,
        "env of an init container": init,
        "envFrom": plain(container={"envFrom": [{"secretRef": {"name": name}}]}),
        "volume": plain(volumes=[{"name": "v", "secret": {"secretName": name}}]),
        "projected": plain(volumes=[{"name": "v", "projected": projected}]),
        "csi": plain(volumes=[{"name": "v", "csi": csi}]),
    }


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("way", _ways_to_a_secret(""))
def test_pod_cannot_mount_the_access_key_of_another_group(ask, overlay, group, way):
    secret = f"fedemb-s3-{group}"
    answer = ask.pod(_ways_to_a_secret(secret)[way], ALICE)
    assert not answer.taken, f"an unlabelled pod took {secret}"
    assert "its own group's access key" in answer.message
    for step, other in GROUP_OF.items():
        pod = _ways_to_a_secret(secret)[way]
        pod["metadata"]["labels"] = {"fedemb.dev/step": step}
        assert ask.pod(pod, CONTROLLER).taken == (other == group), f"{step} asks for {secret}"


def test_a_pod_may_have_its_own_accounts_token_and_no_others(ask, overlay):
    """Argo's agent, which asks a driver outside of the pod, mounts it as a secret."""
    for account, taken in (("fedemb-run", True), ("fedemb-train", False)):
        volumes = [{"name": "t", "secret": {"secretName": f"{account}.service-account-token"}}]
        answer = ask.pod(plain("fedemb-run", volumes=volumes), CONTROLLER)
        assert answer.taken == taken, answer.message


def _held(group: str) -> set[str]:
    rights = GROUPS.get(group, {"signing": [], "keys": {}})
    kinds = {KIND_CLAIMS[kind] for kind in rights["keys"]}
    return kinds | {f"fedemb-keys-{role}" for role in rights["signing"]}


@pytest.mark.parametrize("step", [None, *GROUP_OF])
def test_a_step_mounts_the_keys_its_group_holds_and_no_others(ask, overlay, step):
    held = _held(GROUP_OF.get(step, "run"))
    for claim in sorted(CLAIMS):
        volumes = [{"name": "k", "persistentVolumeClaim": {"claimName": claim}}]
        answer = ask.pod(plain("fedemb-run", step, volumes=volumes), CONTROLLER)
        assert answer.taken == (claim in held), f"{step}, {claim}: {answer.message}"


@pytest.mark.parametrize(
    "source",
    [
        {"dataSource": {"kind": "PersistentVolumeClaim", "name": "fedemb-policy-keys"}},
        {"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "fedemb-policy-keys"}},
    ],
)
def test_cloning_a_key_volume_claim_is_refused(ask, overlay, source):
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "mine", "namespace": "fedemb"},
    }
    path = "/api/v1/namespaces/fedemb/persistentvolumeclaims?dryRun=All"
    assert ask.post(path, {**claim, "spec": spec}).taken
    refused = ask.post(path, {**claim, "spec": {**spec, **source}})
    assert "made of another volume" in refused.message


@pytest.mark.parametrize("step", GROUP_OF)
def test_step_account_requires_the_pod_label(ask, overlay, step):
    account = f"fedemb-{GROUP_OF[step]}"
    assert "only a step's pod" in ask.pod(plain(account), CONTROLLER).message
    labelled = plain(account, step)
    assert "only the workflow controller" in ask.pod(labelled, ALICE).message
    assert ask.pod(labelled, CONTROLLER).taken


def test_unknown_step_is_refused(ask, overlay):
    assert not ask.pod(plain("fedemb-train", "look-at-users"), CONTROLLER).taken


OPEN = {
    "as root": plain(container={"securityContext": {**SYSTEM, "runAsUser": 0}}),
    "with a capability": plain(
        container={"securityContext": {**SYSTEM, "capabilities": {"add": ["NET_ADMIN"]}}}
    ),
    "free to escalate": plain(
        container={"securityContext": {**SYSTEM, "allowPrivilegeEscalation": True}}
    ),
    "without seccomp": plain(
        container={"securityContext": {**SYSTEM, "seccompProfile": {"type": "Unconfined"}}}
    ),
    "on the node's disk": plain(volumes=[{"name": "v", "hostPath": {"path": "/"}}]),
    "on the node's network": plain(hostNetwork=True),
}


@pytest.mark.parametrize("how", OPEN)
def test_privileged_pod_is_refused_by_pod_security(ask, overlay, how):
    answer = ask.pod(OPEN[how], ALICE)
    assert not answer.taken
    assert "restricted" in answer.message


def test_only_argo_and_the_owner_may_exec_into_pods(plane, overlay):
    pod = plain()
    pod["metadata"] = {"name": "idle", "namespace": "fedemb"}
    plane.apply(pod)
    try:
        for entry in (
            ["exec", "idle"],
            ["debug", "idle", "--image=b", "--profile=restricted"],
            ["attach", "idle"],
        ):
            command = ["--", "id"] if entry[0] == "exec" else []
            alice = plane.attempt(*entry, "-n", "fedemb", f"--as={ALICE}", *command)
            assert "Entering a pod of this namespace is forbidden" in alice.stderr, entry
        argo = plane.attempt("exec", "idle", "-n", "fedemb", f"--as={CONTROLLER}", "--", "id")
        assert "is forbidden. Read its log" not in argo.stderr
        assert "does not have a host assigned" in argo.stderr, "past admission; no node exists"
    finally:
        plane.kubectl("delete", "pod", "idle", "-n", "fedemb", "--grace-period=0", "--force")


def test_quickstart_admission_example_is_refused(plane, overlay):
    line = page_block("kubectl -n fedemb run thief")
    arguments = line.split("--overrides=")
    refused = plane.attempt(
        *arguments[0].split()[1:], f"--overrides={arguments[1].strip().strip(chr(39))}"
    )
    assert refused.returncode != 0
    assert "ValidatingAdmissionPolicy" in refused.stderr, "and not by Pod Security"


def test_more_accelerators_than_the_quota_are_refused(ask, overlay):
    wanted = {"limits": {"nvidia.com/gpu": "5", "cpu": "1", "memory": "1Gi"}}
    answer = ask.pod(plain(container={"resources": wanted}), CONTROLLER)
    assert "exceeded quota" in answer.message


def test_only_the_data_owner_may_create_the_owner_pod(ask, overlay):
    if overlay == "gke":
        pytest.skip("keys are in Secret Manager; the owner has an account of Google's")
    pod = yaml.safe_load((INFRA / "kustomize/overlays/s3/owner.yaml").read_text())
    assert "only the data owner" in ask.pod(pod, ALICE).message
    answer = ask.pod(pod, "owner", "fedemb:owners")
    assert (answer.taken, answer.warnings) == (True, []), answer.message
