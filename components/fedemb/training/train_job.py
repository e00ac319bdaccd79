"""Starts the other hosts of a training step: a TrainJob of Kubeflow Trainer (v2, JAX runtime).

The step's pod is the chief. The compiled pipeline sets the number of other hosts and their
TrainingRuntime in environment variables (`fedemb.pipelines.cluster.compile`). The chief starts the
other hosts when it starts and deletes them when it ends, also after an error. If the chief is
killed, its hosts end on their own, and the job is deleted with the chief's pod, which owns it.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import NotRequired, TypedDict, cast

from fedemb.engine.hosts import CHIEF, JobHost
from fedemb.errors import ConfigError, StorageError

_LOG = logging.getLogger(__name__)
HOSTS = "FEDEMB_HOSTS"
"""Environment variable: total number of hosts of the step, including the chief."""
RUNTIME = "FEDEMB_RUNTIME"
"""Environment variable: name of the TrainingRuntime."""
POD = {
    "FEDEMB_ADDRESS": "status.podIP",
    "FEDEMB_NAMESPACE": "metadata.namespace",
    "FEDEMB_POD": "metadata.name",
    "FEDEMB_POD_UID": "metadata.uid",
}
"""Environment variables of the step's pod, and the pod fields that they hold."""
PORT = 2222
"""Port of the chief. Other connections of JAX use ports that the system picks."""
HOST_LABEL = "fedemb.dev/host"
"""Pod label that the network policy selects."""
CONTAINER = "node"
"""Kubeflow Trainer's name of the training container and of its set of pods."""


class Metadata(TypedDict):
    """Namespace of a TrainJob, and the pod that owns it."""

    generateName: str
    name: NotRequired[str]
    """Set by the cluster."""
    namespace: str
    ownerReferences: list[dict[str, str]]


class Trainer(TypedDict):
    """Number of hosts of a TrainJob, and their environment variables."""

    numNodes: int
    env: list[dict[str, str]]


class Spec(TypedDict):
    """Runtime and hosts of a TrainJob."""

    runtimeRef: dict[str, str]
    trainer: Trainer


class TrainJob(TypedDict):
    """Manifest of a TrainJob."""

    apiVersion: str
    kind: str
    metadata: Metadata
    spec: Spec


def train_job() -> TrainJob:
    """Returns the manifest of the TrainJob that the environment variables describe.

    Raises:
      ConfigError: the variables were not set by a compiled pipeline.
    """
    runtime, address, namespace, pod, uid = (os.environ.get(name) for name in (RUNTIME, *POD))
    hosts = os.environ[HOSTS]
    others = int(hosts) - 1 if hosts.isdecimal() else 0
    if others < 1 or not (runtime and address and namespace and pod and uid):
        raise ConfigError(
            f"{HOSTS} is {hosts}, wanted 2 or more, with {RUNTIME} and "
            f"{', '.join(POD)}; compile the pipeline with `fedemb compile`"
        )
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "generateName": "fedemb-hosts-",
            "namespace": namespace,
            "ownerReferences": [owner],
        },
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": runtime,
            },
            "trainer": {
                "numNodes": others,
                "env": [{"name": CHIEF, "value": f"{address}:{PORT}"}],
            },
        },
    }


@contextmanager
def hosts_of_the_step() -> Generator[JobHost | None]:
    """Starts the other hosts while entered; yields the connection between them and the chief.

    Without other hosts in the variables, yields `JobHost.of_environment`.

    Raises:
      ConfigError: the variables are invalid, or the cluster lacks the runtime or the Trainer.
      StorageError: the cluster did not respond.
    """
    if HOSTS not in os.environ:
        yield JobHost.of_environment()
        return
    job = train_job()
    from kubernetes import client, config
    from urllib3.exceptions import HTTPError

    config.load_incluster_config()
    api = client.CustomObjectsApi()
    kind = ("trainer.kubeflow.org", "v1alpha1", job["metadata"]["namespace"], "trainjobs")
    try:
        made = cast("TrainJob", api.create_namespaced_custom_object(*kind, body=job))
    except client.ApiException as error:
        why = f"the cluster refused the TrainJob of the other hosts ({error.status} {error.reason})"
        if error.status in (408, 429) or (error.status or 0) >= 500:
            raise StorageError(f"{why}; resume the run") from error
        raise ConfigError(
            f"{why}; install Kubeflow Trainer 2 with its JAX runtime and apply the file of hosts "
            "that `fedemb compile` wrote, or take `hosts` out of the profile"
        ) from error
    except (OSError, HTTPError) as error:
        raise StorageError(
            f"the cluster's API server does not answer ({type(error).__name__}); resume the run"
        ) from error
    trainer = job["spec"]["trainer"]
    try:
        yield JobHost(trainer["env"][0]["value"], trainer["numNodes"] + 1, 0)
    finally:
        try:
            api.delete_namespaced_custom_object(*kind, name=str(made["metadata"].get("name")))
        except (client.ApiException, OSError, HTTPError) as error:
            # Training results stay valid, and this pod owns the job, so the job is deleted with it.
            _LOG.debug("the TrainJob stays until this pod goes (%s)", type(error).__name__)
