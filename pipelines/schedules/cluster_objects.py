"""Workflows and ScheduledWorkflows of a namespace, read from Kubernetes and not from Kubeflow.

Kubeflow creates these objects before it writes its own row. After a failed call they may exist
while no list of Kubeflow's shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedemb.errors import StorageError

RUN_NAME = "pipelines.kubeflow.org/run_name"
RUN_ID = "pipeline/runid"
ENDED = ("Succeeded", "Failed", "Error")
PAGE = 200


class Reply(Protocol):
    """An answer of the Kubernetes API server."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def body(self) -> Mapping[str, Any]:
        """Object or list."""
        ...


class ObjectsApi(Protocol):
    """Methods of `fedemb.pipelines.doctor.kubernetes_api.KubernetesApi` that are used here."""

    def get(self, path: str) -> Reply:
        """Reads an object or a list."""
        ...

    def delete(self, path: str) -> Reply:
        """Deletes an object."""
        ...


@dataclass(frozen=True)
class Workflow:
    """Workflow of a run."""

    name: str
    run_name: str
    run_id: str
    ended: bool


@dataclass(frozen=True)
class ScheduledWorkflow:
    """ScheduledWorkflow of a recurring run."""

    name: str
    uid: str
    """Id of its recurring run, if Kubeflow has one."""
    prefix: str
    """Prefix of the name, which Kubeflow derives from the name of the recurring run."""
    version_id: str
    enabled: bool


class ClusterObjects:
    """Objects of one namespace.

    Args:
      api: the cluster; None: no cluster can be asked.
      namespace: of the runs.
    """

    def __init__(self, api: ObjectsApi | None, namespace: str) -> None:
        self._api, self.namespace = api, namespace

    def workflows(self, name_part: str) -> list[Workflow] | None:
        """Returns the Workflows of runs whose name contains a text; None: they cannot be read."""
        items = self._list("argoproj.io/v1alpha1", "workflows")
        if items is None:
            return None
        found = [_workflow(item) for item in items]
        return [workflow for workflow in found if name_part in workflow.run_name]

    def scheduled_workflows(self) -> list[ScheduledWorkflow] | None:
        """Returns all ScheduledWorkflows; None: they cannot be read."""
        items = self._list("kubeflow.org/v1beta1", "scheduledworkflows")
        return None if items is None else [_scheduled(item) for item in items]

    def pipeline_root(self) -> str | None:
        """Returns the public root of the namespace; None: it cannot be read."""
        try:
            path = f"/api/v1/namespaces/{self.namespace}/configmaps/kfp-launcher"
            reply = self._api.get(path) if self._api is not None else None
        except StorageError:
            return None
        if reply is None or reply.status != 200:
            return None
        return (reply.body.get("data") or {}).get("defaultPipelineRoot") or None

    def delete_scheduled_workflow(self, name: str) -> bool:
        """Deletes one; returns whether it is gone."""
        path = self._path("kubeflow.org/v1beta1", "scheduledworkflows")
        try:
            return self._api is not None and self._api.delete(f"{path}/{name}").status in (200, 404)
        except StorageError:
            return False

    def _list(self, group: str, kind: str) -> list[Mapping[str, Any]] | None:
        items: list[Mapping[str, Any]] = []
        following = ""
        while self._api is not None:
            page = f"?limit={PAGE}{f'&continue={following}' if following else ''}"
            try:
                reply = self._api.get(self._path(group, kind) + page)
            except StorageError:
                return None
            if reply.status != 200:
                return None
            items += reply.body.get("items") or []
            following = (reply.body.get("metadata") or {}).get("continue", "")
            if not following:
                return items
        return None

    def _path(self, group: str, kind: str) -> str:
        return f"/apis/{group}/namespaces/{self.namespace}/{kind}"


def _workflow(item: Mapping[str, Any]) -> Workflow:
    metadata = item["metadata"]
    return Workflow(
        name=metadata["name"],
        run_name=metadata.get("annotations", {}).get(RUN_NAME, ""),
        run_id=metadata.get("labels", {}).get(RUN_ID, ""),
        ended=item.get("status", {}).get("phase") in ENDED,
    )


def _scheduled(item: Mapping[str, Any]) -> ScheduledWorkflow:
    metadata, spec = item["metadata"], item.get("spec", {})
    return ScheduledWorkflow(
        name=metadata["name"],
        uid=metadata["uid"],
        prefix=metadata.get("generateName", ""),
        version_id=spec.get("pipelineVersionId", ""),
        enabled=spec.get("enabled") is not False,
    )
