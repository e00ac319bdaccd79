"""Asks the Kubernetes API server: objects, permissions, and whether it would take a pod."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import JsonFields, JsonObject
from fedemb.pipelines.compile.fields import text_at, value_at

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
