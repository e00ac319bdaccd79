"""Pods as Kubeflow 2.17 and Argo make them from a compiled pipeline, and a question about each.

The frame (init, wait, launcher, their security contexts, the secret of Argo's archive) is that of
Kubeflow's compiler and of the controller configuration it ships.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from control_plane import ControlPlane

CLOSED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SYSTEM = {**CLOSED, "runAsNonRoot": True, "runAsUser": 65532}
IMAGE = "registry.example/fedemb@sha256:" + "a" * 64


@dataclass(frozen=True)
class Answer:
    """What the API server said of an object it was asked to take."""

    status: int
    body: dict[str, Any]
    warnings: list[str]

    @property
    def taken(self) -> bool:
        """Whether it would be made."""
        return self.status in (200, 201)

    @property
    def message(self) -> str:
        """Why not."""
        return str(self.body.get("message", ""))


class Asker:
    """Sends what may not stay: every request is a dry run, on behalf of somebody."""

    def __init__(self, plane: ControlPlane) -> None:
        config = json.loads(plane.kubeconfig.read_text())
        self._host = config["clusters"][0]["cluster"]["server"]
        self._token = config["users"][0]["user"]["token"]
        urllib3.disable_warnings()
        self._pool = urllib3.PoolManager(cert_reqs="CERT_NONE")

    def post(
        self, path: str, body: dict[str, Any], user: str | None = None, group: str | None = None
    ) -> Answer:
        """Creates in a dry run, as a user and a member of a group, or as the administrator."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if user is not None:
            headers |= {"Impersonate-User": user}
        if group is not None:
            headers |= {"Impersonate-Group": group}
        answer = self._pool.request("POST", self._host + path, json.dumps(body), headers=headers)
        warnings = answer.headers.getlist("Warning")
        return Answer(answer.status, json.loads(answer.data), warnings)

    def pod(self, pod: dict[str, Any], user: str | None = None, group: str | None = None) -> Answer:
        """Whether this pod would be made in the namespace of the runs."""
        return self.post("/api/v1/namespaces/fedemb/pods?dryRun=All", pod, user, group)


def compiled(folder: Path, *profiles: str | Path) -> dict[str, dict[str, Any]]:
    """Step -> its pod, compiled with these profiles."""
    from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images
    from fedemb.pipelines.cluster.rules import read_compiled

    path = folder / "fedemb.yaml"
    compile_pipeline(path, profile=profiles, images=parse_images([IMAGE]))
    spec, platform = read_compiled(path)
    options = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return {
        options[name]["podMetadata"]["labels"]["fedemb.dev/step"]: _pod(
            executor["container"], options[name]
        )
        for name, executor in spec["deploymentSpec"]["executors"].items()
    }


def _pod(container: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {}} for name in ("kfp-launcher", "gcs-scratch", "var-run-argo")
    ]
    mounts = [
        {"name": "kfp-launcher", "mountPath": "/kfp-launcher"},
        {"name": "gcs-scratch", "mountPath": "/gcs"},
        {"name": "var-run-argo", "mountPath": "/var/run/argo"},
    ]
    for held in options.get("emptyDirMounts", []):
        kind = {"medium": "Memory"} if held.get("medium") == "Memory" else {}
        volumes.append({"name": held["volumeName"], "emptyDir": kind})
        mounts.append({"name": held["volumeName"], "mountPath": held["mountPath"]})
    for held in options.get("pvcMount", []):
        claim = held["constant"] if "constant" in held else held["pvcNameParameter"]
        claim = claim if isinstance(claim, str) else claim["runtimeValue"]["constant"]
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": claim, "mountPath": held["mountPath"]})
    variables = [
        {
            "name": pair["envVar"],
            "valueFrom": {"secretKeyRef": {"name": secret["secretName"], "key": pair["secretKey"]}},
        }
        for secret in options.get("secretAsEnv", [])
        for pair in secret["keyToEnv"]
    ]
    archive = {"name": "mlpipeline-minio-artifact", "key": "accesskey"}
    main = {
        "name": "main",
        "image": container["image"],
        "command": container["command"],
        "args": container["args"],
        "env": variables,
        "resources": _resources(container["resources"]),
        "volumeMounts": mounts,
        "securityContext": {
            **CLOSED,
            "runAsNonRoot": options.get("securityContext", {}).get("runAsNonRoot", False),
        },
    }
    wait = {
        "name": "wait",
        "image": "quay.io/argoproj/argoexec:v3.7.3",
        "env": [{"name": "ARCHIVE", "valueFrom": {"secretKeyRef": archive}}],
        "securityContext": SYSTEM,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "fedemb-", "labels": options["podMetadata"]["labels"]},
        "spec": {
            "serviceAccountName": "fedemb-run",
            "restartPolicy": "Never",
            "hostUsers": False,  # as Kubeflow 2.17 sets it where its configuration says nothing
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [
                {"name": "init", "image": "argoexec", "securityContext": SYSTEM},
                {"name": "kfp-launcher", "image": "launcher", "securityContext": SYSTEM},
            ],
            "containers": [wait, main],
            "volumes": volumes,
        },
    }


def _resources(asked: dict[str, Any]) -> dict[str, dict[str, str]]:
    limits = {"cpu": asked["resourceCpuLimit"], "memory": asked["resourceMemoryLimit"]}
    if chips := asked.get("accelerator"):
        limits[chips["resourceType"]] = chips["resourceCount"]
    requests = {"cpu": asked["resourceCpuRequest"], "memory": asked["resourceMemoryRequest"]}
    return {"limits": limits, "requests": requests}


def plain(account: str = "fedemb-run", step: str | None = None, **spec: Any) -> dict[str, Any]:
    """A pod of one closed container, on an account, with or without a step's label."""
    labels = {"labels": {"fedemb.dev/step": step}} if step else {}
    container = {"name": "main", "image": "busybox", "securityContext": SYSTEM}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "pod-", **labels},
        "spec": {
            "serviceAccountName": account,
            "containers": [{**container, **spec.pop("container", {})}],
            **spec,
        },
    }
