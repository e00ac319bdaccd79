"""The overlays in a namespace that Kubeflow's multi-user install made first."""

from __future__ import annotations

import json

import pytest
from conftest import FRAME, MAY_MAKE_PODS

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


@pytest.mark.parametrize("overlay_name", ["gke", "s3"])
@pytest.mark.usefixtures("profile")
def test_overlay_applies_by_the_lines_of_the_quickstart(plane, applied, overlay_name):
    with applied(overlay_name):
        labels = _object(plane, "namespace", "fedemb")["metadata"]["labels"]
        assert labels[PROFILE_LABEL] == "kubeflow-profile"
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
        launcher = _object(plane, "configmap", "kfp-launcher", "-n", "fedemb")
        scheme = {"gke": "gs", "s3": "s3"}[overlay_name]
        assert launcher["data"]["defaultPipelineRoot"].startswith(f"{scheme}://")
        assert launcher["data"]["clusterDomain"] == LAUNCHER["data"]["clusterDomain"]
        # Applying the overlay again conflicts with nothing.
        again = plane.attempt("apply", "--server-side", "-k", str(plane.deployed))
        assert again.returncode == 0, again.stderr


@pytest.mark.usefixtures("profile")
def test_a_label_or_a_root_of_ours_would_conflict(plane):
    """Shows that the test above tests something: the two objects have other owners."""
    theirs = {"metadata": {"name": "fedemb", "labels": {PROFILE_LABEL: "fedemb"}}}
    ours = {**LAUNCHER, "data": {"defaultPipelineRoot": "gs://ours/runs"}}
    for thing in ({**PROFILE, **theirs}, ours):
        text = json.dumps(thing)
        done = plane.attempt("apply", "--server-side", "-f", "-", given=text)
        assert done.returncode != 0
        assert "conflict" in done.stderr
