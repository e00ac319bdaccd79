"""`fedemb doctor` at a real API server: when all is well, and of each harm."""

from __future__ import annotations

import json

import pytest
from conftest import INFRA
from typer.testing import CliRunner

from fedemb.pipelines.steps import rights_of_groups


def _object(kind: str, name: str, namespace: str, version: str = "v1", **body) -> dict:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


@pytest.fixture
def kubeflow(plane, overlay):
    """The secrets of the profile for S3."""
    named = {f"fedemb-s3-{group}" for group in rights_of_groups()}
    objects = [
        _object("Secret", name, "fedemb", stringData={"access_key": "a", "secret_key": "b"})
        for name in sorted(named)
    ]
    plane.apply(*objects)
    yield objects
    for thing in objects:
        meta = thing["metadata"]
        plane.kubectl(
            "delete", thing["kind"], meta["name"], "-n", meta["namespace"], "--ignore-not-found"
        )


@pytest.fixture
def ask_doctor(plane, overlay, monkeypatch, tmp_path):
    """Runs the command; returns exit code and the state and text of each check."""
    from fedemb.pipelines.cli.main import app

    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*more: str):
        result = CliRunner().invoke(app, ["doctor", "--profile", "cpu", *_s3(overlay), *more])
        lines = [line for line in result.output.splitlines() if line[:15].strip()]
        states = {}
        for line in lines:
            state, check = line[:15].strip(), line[16:30].strip()
            if state in ("ok", "unsafe", "could not tell", "accepted"):
                states.setdefault(check, (state, line[31:]))
        return result, states

    return run


def _s3(overlay: str) -> list[str]:
    return ["--profile", str(INFRA / "profiles" / "s3.yaml")] if overlay == "s3" else []


def test_quickstart_cluster_is_safe(ask_doctor, kubeflow):
    result, states = ask_doctor()
    assert not {check for check, (state, _) in states.items() if state == "unsafe"}, result.output
    assert result.exception is None or result.exit_code == 0
    for check in ("rights", "editors", "thief", "pod-security", "network"):
        assert states[check][0] == "ok", result.output
    assert "name the run's configuration by --config" in states["stores"][1]


HARMS = {
    "rights": [
        *("create", "rolebinding", "too-much", "-n", "fedemb", "--clusterrole=admin"),
        "--serviceaccount=fedemb:fedemb-evaluate",
    ],
    "editors": [
        *("create", "rolebinding", "too-much", "-n", "fedemb", "--clusterrole=edit"),
        "--serviceaccount=fedemb:default-editor",
    ],
    "thief": ["delete", "validatingadmissionpolicybinding", "fedemb-step-accounts"],
    "admission": ["delete", "mutatingadmissionpolicy", "fedemb-step-pods"],
    "pod-security": [
        *("label", "namespace", "fedemb", "--overwrite"),
        "pod-security.kubernetes.io/enforce=privileged",
    ],
    "network": ["delete", "networkpolicy", "fedemb-nothing-else", "-n", "fedemb"],
    "public-root": [
        *("patch", "configmap", "kfp-launcher", "-n", "fedemb"),
        *("-p", '{"data": {"defaultPipelineRoot": "set by the overlay"}}'),
    ],
}
"""Check -> what an administrator may do to a cluster by mistake."""


@pytest.mark.parametrize("scheme", ["minio", "s3"])
@pytest.mark.usefixtures("kubeflow")
def test_a_launcher_that_still_points_to_the_root_of_kubeflow_is_refused(
    ask_doctor, plane, reapply, scheme
):
    root = f"{scheme}://mlpipeline/private-artifacts/fedemb/v2/artifacts"
    patch = json.dumps({"data": {"defaultPipelineRoot": root}})
    plane.kubectl("patch", "configmap", "kfp-launcher", "-n", "fedemb", "-p", patch)
    try:
        result, states = ask_doctor()
        assert states["public-root"][0] == "unsafe", result.output
        assert "Kubeflow's own root" in states["public-root"][1]
        assert result.exit_code == 3 or "unsafe" in str(result.exception)
    finally:
        reapply()
    assert ask_doctor()[1]["public-root"][0] == "ok"


@pytest.mark.parametrize("check", HARMS)
@pytest.mark.usefixtures("kubeflow")
def test_each_unsafe_setting_is_refused_with_a_remedy(ask_doctor, plane, reapply, check):
    plane.kubectl(*HARMS[check])
    try:
        until = 50
        while until:
            result, states = ask_doctor()
            if states[check][0] == "unsafe":
                break
            until -= 1  # a policy that went stays in force for a moment
        assert states[check][0] == "unsafe", result.output
        assert "; " in states[check][1], "it comes with a remedy"
        assert result.exit_code == 3 or "unsafe" in str(result.exception)
        accepting = plane.folder / "accepting.yaml"
        accepting.write_text(json.dumps({"accepts": ["admission", "thief", check]}))
        result, states = ask_doctor("--profile", str(accepting))
        assert states[check][0] == "accepted", result.output
        assert result.exit_code == 0, result.output
    finally:
        plane.attempt("delete", "rolebinding", "too-much", "-n", "fedemb")
        reapply()


def test_unsafe_cluster_is_refused_before_submission(plane, overlay, monkeypatch, tmp_path):
    from fedemb.errors import Refused
    from fedemb.pipelines.cli.cluster import check_cluster_first

    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    with pytest.raises(Refused, match="unsafe"):
        check_cluster_first("another-namespace", ["cpu"], [])
