"""The other hosts of a training step: the TrainingRuntime that Kubeflow Trainer makes them from.

`fedemb compile` writes it beside the pipeline where the profile gives a step more than one host.
Apply it once; the step then starts a TrainJob of it (`fedemb.training.train_job`), which names it
and nothing else: image, node pool and resources are decided here. Its pods have no service account,
no key and no store, and a network policy lets them talk to their step alone
(infra/kustomize/base/network_policy.yaml).
"""

from __future__ import annotations

from collections.abc import Iterator

from fedemb.foundation.canonical_json import Json, JsonObject, canonical_json, sha256_hex
from fedemb.pipelines.compile.fields import object_at, objects_at, text_at, value_at
from fedemb.pipelines.compile.rules import DIGEST
from fedemb.training.train_job import CONTAINER, HOST_LABEL

_CLOSED: JsonObject = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def training_runtime(
    *,
    image: str,
    namespace: str,
    resources: JsonObject,
    environment: dict[str, str],
    node_selector: JsonObject,
    tolerations: list[Json],
    shared_memory: str | None,
) -> JsonObject:
    """Returns the manifest; its name has the digest of the rest, so that a pipeline finds its own.

    `resources` are limits and requests of each host, accelerators included; `shared_memory` is the
    size of /dev/shm.
    """
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}]
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}]
    if shared_memory:
        limited: JsonObject = {"medium": "Memory", "sizeLimit": shared_memory}
        volumes.append({"name": "shm", "emptyDir": limited})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container: JsonObject = {
        "name": CONTAINER,
        "image": image,
        "command": ["python3", "-m", "fedemb.training.hosts"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"limits": resources, "requests": resources},
        "securityContext": _CLOSED,
        "volumeMounts": mounts,
    }
    pod: JsonObject = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": node_selector,
        "tolerations": tolerations,
        "volumes": volumes,
        "containers": [container],
    }
    job: JsonObject = {
        "backoffLimit": 0,  # a host that comes again finds no chief
        "template": {"metadata": {"labels": {HOST_LABEL: "train"}}, "spec": pod},
    }
    return _named_runtime(job, namespace)


def _named_runtime(job: JsonObject, namespace: str) -> JsonObject:
    """Returns the runtime of a job; its name contains the digest of its content."""
    ancestor: JsonObject = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template: JsonObject = {"metadata": {"labels": ancestor}, "spec": job}
    spec: JsonObject = {
        "mlPolicy": {"numNodes": 1, "jax": {}},
        "template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": template}]}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {
            "name": f"fedemb-hosts-{sha256_hex(canonical_json(spec))[:10]}",
            "namespace": namespace,
            "labels": {"trainer.kubeflow.org/framework": "jax"},
        },
        "spec": spec,
    }


def violations_of_hosts(runtime: JsonObject) -> Iterator[str]:
    """Every rule that a TrainingRuntime breaks, as a sentence."""
    for replicated in objects_at(runtime, "spec", "template", "spec", "replicatedJobs"):
        job = object_at(replicated, "template", "spec")
        pod = object_at(job, "template", "spec")
        if value_at(job, "backoffLimit") != 0 or pod.get("restartPolicy") != "Never":
            yield "hosts may be started again, and find no chief; set backoffLimit: 0 and Never"
        if value_at(job, "template", "metadata", "labels", HOST_LABEL) != "train":
            yield f"hosts lack the label {HOST_LABEL}, so no network policy closes them; add it"
        if pod.get("automountServiceAccountToken") is not False or "serviceAccountName" in pod:
            yield "hosts have a service account; they need none, so take it out"
        if any("emptyDir" not in volume for volume in objects_at(pod, "volumes")):
            yield "hosts mount a volume; they hold no keys and no stores, so take it out"
        if not value_at(pod, "securityContext", "runAsNonRoot"):
            yield "hosts may run as root; compile again with `fedemb compile`"
        for container in [*objects_at(pod, "containers"), *objects_at(pod, "initContainers")]:
            image = text_at(container, "image")
            if not DIGEST.search(image):
                yield f"hosts use {image}, not a digest; name it as REF@sha256:..."
            held = [*objects_at(container, "env"), *objects_at(container, "envFrom")]
            if any("value" not in variable for variable in held):
                yield "hosts take a secret or a field of the cluster as variable; take it out"
            closed = object_at(container, "securityContext")
            if {name: closed.get(name) for name in _CLOSED} != _CLOSED:
                yield "hosts may write to their root or gain rights; compile with `fedemb compile`"
