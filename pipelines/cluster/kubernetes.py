"""Asks the Kubernetes API server: objects, permissions, and whether it would take a pod.

Workflows and ScheduledWorkflows of a namespace, read from Kubernetes and not from Kubeflow.

Kubeflow creates these objects before it writes its own row. After a failed call they may exist
while no list of Kubeflow's shows them.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import JsonFields, JsonObject
from fedemb.pipelines.cluster.rules import objects_at, text_at, value_at

TIMEOUT = 10.0
"""Seconds an answer may take."""


@dataclass(frozen=True)
class Answer:
    """Answer of the server."""

    status: int
    body: JsonObject
    date: str = ""
    """Its clock, as an HTTP date."""

    @property
    def message(self) -> str:
        """Why it refused."""
        return text_at(self.body, "message")


class KubernetesApi:
    """The API server that the environment names: a pod's own, or that of the kubeconfig.

    Raises:
      StorageError: none is named, or it does not answer.
    """

    def __init__(self) -> None:
        from kubernetes import client, config

        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config()
            else:  # set here: the client reads the environment only at import
                config.load_kube_config(os.environ.get("KUBECONFIG"))
        except (config.ConfigException, TypeError, OSError) as error:
            raise StorageError(
                "no Kubernetes cluster is named here; set KUBECONFIG, or run this in a pod"
            ) from error
        self._client: Any = client.ApiClient()
        self._refusal: Any = client.ApiException

    def get(self, path: str) -> Answer:
        """Reads an object or a list."""
        return self._ask("GET", path)

    def post(self, path: str, body: JsonFields) -> Answer:
        """Sends an object: a review, or a dry run."""
        return self._ask("POST", path, body)

    def delete(self, path: str) -> Answer:
        """Deletes an object."""
        return self._ask("DELETE", path)

    def may(self, user: str, namespace: str, verb: str, thing: tuple[str, str, str]) -> bool | None:
        """Whether RBAC lets a service account do this; None: we may not ask."""
        group, resource, name = thing
        resource, _, sub = resource.partition("/")
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{namespace}:{user}",
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{namespace}",
                    "system:authenticated",
                ],
                "resourceAttributes": {
                    "namespace": namespace,
                    "verb": verb,
                    "group": group,
                    "resource": resource,
                    "subresource": sub,
                    "name": name,
                },
            },
        }
        answer = self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(value_at(answer.body, "status", "allowed")) if answer.status == 201 else None

    def _ask(self, method: str, path: str, body: JsonFields | None = None) -> Answer:
        import urllib3

        try:
            data, status, headers = self._client.call_api(
                quote(path, safe="/?=&"),
                method,
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                response_type="object",
                auth_settings=["BearerToken"],
                _request_timeout=TIMEOUT,
            )
            return Answer(status, data, headers.get("Date", ""))
        except self._refusal as error:
            try:
                return Answer(error.status, json.loads(error.body or "{}"))
            except ValueError:
                return Answer(error.status, {"message": str(error.reason)})
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise StorageError(
                f"the Kubernetes API does not answer ({type(error).__name__}); check KUBECONFIG"
            ) from error


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
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/kfp-launcher"
        with contextlib.suppress(StorageError):
            if self._api is not None:
                return text_at(self._api.get(path).body, "data", "defaultPipelineRoot") or None
        return None

    def delete_scheduled_workflow(self, name: str) -> None:
        """Deletes one; a disabled one that stays does no harm."""
        path = self._path("kubeflow.org/v1beta1", "scheduledworkflows")
        with contextlib.suppress(StorageError):
            if self._api is not None:
                self._api.delete(f"{path}/{name}")

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
