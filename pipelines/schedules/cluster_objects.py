"""Workflows and ScheduledWorkflows of a namespace, read from Kubernetes and not from Kubeflow.

Kubeflow creates these objects before it writes its own row. After a failed call they may exist
while no list of Kubeflow's shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import JsonObject
from fedemb.pipelines.compile.fields import objects_at, text_at, value_at
from fedemb.pipelines.schedules.kubernetes_api import KubernetesApi

RUN_NAME = "pipelines.kubeflow.org/run_name"
RUN_ID = "pipeline/runid"
ENDED = ("Succeeded", "Failed", "Error")
PAGE = 200


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
    enabled: bool


class ClusterObjects:
    """Objects of the namespace of the runs; `api` None: no cluster can be asked."""

    def __init__(self, api: KubernetesApi | None, namespace: str) -> None:
        self._api, self.namespace = api, namespace

    def workflows(self, name_part: str) -> list[Workflow] | None:
        """Returns the Workflows of runs whose name contains a text; None: they cannot be read."""
        items = self._list("argoproj.io/v1alpha1", "workflows")
        if items is None:
            return None
        found = [
            Workflow(
                name=text_at(item, "metadata", "name"),
                run_name=text_at(item, "metadata", "annotations", RUN_NAME),
                run_id=text_at(item, "metadata", "labels", RUN_ID),
                ended=text_at(item, "status", "phase") in ENDED,
            )
            for item in items
        ]
        return [workflow for workflow in found if name_part in workflow.run_name]

    def scheduled_workflows(self) -> list[ScheduledWorkflow] | None:
        """Returns all ScheduledWorkflows; None: they cannot be read."""
        items = self._list("kubeflow.org/v1beta1", "scheduledworkflows")
        if items is None:
            return None
        return [
            ScheduledWorkflow(
                name=text_at(item, "metadata", "name"),
                uid=text_at(item, "metadata", "uid"),
                prefix=text_at(item, "metadata", "generateName"),
                enabled=value_at(item, "spec", "enabled") is True,  # Go omits false
            )
            for item in items
        ]

    def pipeline_root(self) -> str | None:
        """Returns the public root of the namespace; None: it cannot be read."""
        try:
            path = f"/api/v1/namespaces/{self.namespace}/configmaps/kfp-launcher"
            reply = self._api.get(path) if self._api is not None else None
        except StorageError:
            return None
        if reply is None or reply.status != 200:
            return None
        return text_at(reply.body, "data", "defaultPipelineRoot") or None

    def delete_scheduled_workflow(self, name: str) -> bool:
        """Deletes one; returns whether it is gone."""
        path = self._path("kubeflow.org/v1beta1", "scheduledworkflows")
        try:
            return self._api is not None and self._api.delete(f"{path}/{name}").status in (200, 404)
        except StorageError:
            return False

    def _list(self, group: str, kind: str) -> list[JsonObject] | None:
        items: list[JsonObject] = []
        following = ""
        while self._api is not None:
            page = f"?limit={PAGE}{f'&continue={following}' if following else ''}"
            try:
                reply = self._api.get(self._path(group, kind) + page)
            except StorageError:
                return None
            if reply.status != 200:
                return None
            items += objects_at(reply.body, "items")
            following = text_at(reply.body, "metadata", "continue")
            if not following:
                return items
        return None

    def _path(self, group: str, kind: str) -> str:
        return f"/apis/{group}/namespaces/{self.namespace}/{kind}"
