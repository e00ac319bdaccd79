"""RBAC and network policies as a real API server holds them: each account, each verb, both ways."""

from __future__ import annotations

import json

import pytest
import yaml
from conftest import FRAME, INFRA, MAY_MAKE_PODS

from fedemb.pipelines.cluster.kubernetes import KubernetesApi

GROUPS = yaml.safe_load((INFRA / "rights.yaml").read_text())["groups"]
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
EVERY_STEP = {
    ("argoproj.io", "workflowtaskresults", ""): {"create", "patch"},
    ("", "configmaps", "kfp-launcher"): {"get"},
    ("", "configmaps", "metadata-grpc-configmap"): {"get"},
}
"""What the launcher and the executor in a step's pod need."""
DRIVER = {
    ("", "persistentvolumeclaims", ""): {"get", "list", "create", "delete"},
    ("", "pods", ""): {"get", "list", "watch"},
    ("argoproj.io", "workflowtasksets", ""): {"list", "watch"},
    ("argoproj.io", "workflowtasksets/status", ""): {"patch"},
}
THINGS = [
    *EVERY_STEP,
    *DRIVER,
    *[("", "secrets", f"fedemb-s3-{group}") for group in ["run", *GROUPS]],
    ("", "secrets", "mlpipeline-minio-artifact"),
    ("", "configmaps", "another"),
    ("", "pods/exec", ""),
    ("", "pods/ephemeralcontainers", ""),
    ("", "serviceaccounts/token", "fedemb-train"),
    ("argoproj.io", "workflows", ""),
    ("rbac.authorization.k8s.io", "roles", ""),
    ("rbac.authorization.k8s.io", "rolebindings", ""),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies", ""),
    ("networking.k8s.io", "networkpolicies", ""),
]


@pytest.mark.parametrize("group", ["run", *GROUPS])
def test_each_service_account_has_exactly_the_rights_it_needs(plane, overlay, group, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    api = KubernetesApi()
    allowed = {**EVERY_STEP, **(DRIVER if group == "run" else {})}
    if overlay == "s3":
        allowed["", "secrets", "fedemb-s3-run"] = {"get"}  # of the public root, for the launcher
    for thing in THINGS:
        may = {verb for verb in VERBS if api.may(f"fedemb-{group}", "fedemb", verb, thing)}
        assert may == allowed.get(thing, set()), (group, thing)


def _selects(selector: dict, labels: dict[str, str]) -> bool:
    """Whether a policy's selector means a pod of these labels."""
    for term in selector.get("matchExpressions", []):
        there, values = labels.get(term["key"]), term.get("values", [])
        held = {
            "Exists": there is not None,
            "DoesNotExist": there is None,
            "In": there in values,
            "NotIn": there not in values,
        }
        if not held[term["operator"]]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def _flows(policies: list[dict], labels: dict[str, str]) -> set[tuple[str, int]]:
    """Where a pod of these labels may open connections to, and on which port; 0: on any."""
    return {
        (json.dumps(to, sort_keys=True), port["port"])
        for policy in policies
        if _selects(policy["spec"]["podSelector"] or {}, labels)
        for rule in policy["spec"].get("egress", [])
        for to in rule.get("to", [{}])
        for port in rule.get("ports", [{"port": 0}])
    }


def test_network_policies_allow_only_the_connections_a_run_needs(plane, overlay):
    found = json.loads(plane.kubectl("get", "networkpolicies", "-n", "fedemb", "-o", "json"))
    closed = [
        policy["metadata"]["name"]
        for policy in found["items"]
        if policy["spec"]["podSelector"] in ({}, None)
        and policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        and not policy["spec"].get("ingress")
    ]
    assert closed == ["fedemb-nothing-else"]

    def of(namespace: str) -> str:
        labels = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        return json.dumps({"namespaceSelector": labels}, sort_keys=True)

    def block(cidr: str) -> str:
        return json.dumps({"ipBlock": {"cidr": cidr}})

    stores = {
        "gke": {(block("199.36.153.4/30"), 443)}
        | {(block("169.254.169.252/30"), port) for port in (80, 988, 8080)}
        | {(block(f"{resolver}/32"), 53) for resolver in ("169.254.169.254", "169.254.20.10")},
        "s3": {(of("minio"), 9000)},
    }[overlay]
    kubeflow = {(of("kubeflow"), port) for port in (8080, 8887, 8888, 8333, 9000)}
    control_plane = {(block("172.16.0.0/28"), port) for port in (443, 6443)}
    needed = kubeflow | control_plane | stores | {(of("kube-system"), 53)}

    def pods(**selector: object) -> str:
        return json.dumps({"podSelector": selector}, sort_keys=True)

    hosts = pods(matchLabels={"fedemb.dev/host": "train"})
    chiefs = pods(matchLabels={"fedemb.dev/step": "train-model"})
    flows = {
        "any": ({}, needed),
        "gate": ({"fedemb.dev/step": "gate-release"}, needed),
        "chief": ({"fedemb.dev/step": "train-model"}, needed | {(hosts, 0)}),
        "host": ({"fedemb.dev/host": "train"}, {(hosts, 0), (chiefs, 0)}),
    }
    for labels, wanted in flows.values():
        assert _flows(found["items"], labels) == wanted, labels


# ---- The overlays in a namespace that Kubeflow's multi-user install made first ----


PROFILE_LABEL = "app.kubernetes.io/part-of"
KUBEFLOW_ROOT = "minio://mlpipeline/private-artifacts/fedemb/v2/artifacts"
PROFILE = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {
        "name": "fedemb",
        "labels": {PROFILE_LABEL: "kubeflow-profile", "pipelines.kubeflow.org/enabled": "true"},
        "annotations": {"owner": "owner@example.org"},
    },
}
LAUNCHER = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "kfp-launcher", "namespace": "fedemb"},
    "data": {"defaultPipelineRoot": KUBEFLOW_ROOT, "clusterDomain": ".svc.cluster.local"},
}


@pytest.fixture
def profile(plane):
    """What the profile controller and metacontroller make, each as its own field manager."""
    plane.kubectl("delete", "namespace", "fedemb", "--ignore-not-found", "--wait=true")
    plane.apply(*FRAME[:2])
    for thing, manager in ((PROFILE, "profile-controller"), (LAUNCHER, "metacontroller")):
        text = json.dumps(thing)
        plane.kubectl("create", f"--field-manager={manager}", "-f", "-", given=text)
    plane.apply(MAY_MAKE_PODS)


def _object(plane, *words: str) -> dict:
    return json.loads(plane.kubectl("get", *words, "-o", "json"))


@pytest.mark.parametrize("overlay_name", ["gke", "s3", "laptop"])
@pytest.mark.usefixtures("profile")
def test_overlay_applies_to_a_kubeflow_profile_without_conflicts(plane, applied, overlay_name):
    with applied(overlay_name):
        labels = _object(plane, "namespace", "fedemb")["metadata"]["labels"]
        assert labels[PROFILE_LABEL] == "kubeflow-profile"
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
        launcher = _object(plane, "configmap", "kfp-launcher", "-n", "fedemb")
        scheme = "gs" if overlay_name == "gke" else "s3"
        assert launcher["data"]["defaultPipelineRoot"].startswith(f"{scheme}://")
        assert launcher["data"]["clusterDomain"] == LAUNCHER["data"]["clusterDomain"]
        # Applying the overlay again conflicts with nothing.
        again = plane.attempt("apply", "--server-side", "-k", str(plane.deployed))
        assert again.returncode == 0, again.stderr


@pytest.mark.usefixtures("profile")
def test_conflicting_labels_and_roots_are_detected(plane):
    """Shows that the test above tests something: the two objects have other owners."""
    theirs = {"metadata": {"name": "fedemb", "labels": {PROFILE_LABEL: "fedemb"}}}
    ours = {**LAUNCHER, "data": {"defaultPipelineRoot": "gs://ours/runs"}}
    for thing in ({**PROFILE, **theirs}, ours):
        text = json.dumps(thing)
        done = plane.attempt("apply", "--server-side", "-f", "-", given=text)
        assert done.returncode != 0
        assert "conflict" in done.stderr
