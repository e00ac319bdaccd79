"""What a compiled pipeline must never do. Each rule looks at the YAML, not at our intentions.

Why each: `platform.md` 7 in the design notes; in short, a cached or retried private step spends
privacy that nobody accounts for, and a path around the gate releases what nobody allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

PRIVATE = ("reserve-budget", "partition-users", "train-dp-fedemb", "evaluate-embeddings")
DECIDING = ("audit-privacy", "account-privacy", "gate-release", "release-model", "plan-privacy")
RAW_WORDS = ("diagnostics", "rejects", "scores", "user_records", "evaluation_identities")
SECRET_WORDS = re.compile(r"(secret|password|token|private_key|access_key|credential)", re.I)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")

Spec = dict[str, Any]


def violations(documents: list[Spec]) -> list[str]:
    """Returns every broken rule as a sentence; an empty list is a safe pipeline."""
    spec = documents[0]
    platform = documents[1] if len(documents) > 1 else {}
    return [problem for rule in RULES for problem in rule(spec, platform)]


def _dags(spec: Spec) -> Iterator[tuple[str, Spec]]:
    yield "root", spec["root"]["dag"]
    for name, component in spec.get("components", {}).items():
        if "dag" in component:
            yield name, component["dag"]


def _tasks(spec: Spec) -> Iterator[tuple[str, Spec]]:
    for dag in dict(_dags(spec)).values():
        yield from dag["tasks"].items()


def _step(task: Spec) -> str:
    return task["componentRef"]["name"].removeprefix("comp-")


def no_cache(spec: Spec, _: Spec) -> Iterator[str]:
    """Steps that touch private data or decide about it always run."""
    for name, task in _tasks(spec):
        if task.get("cachingOptions", {}).get("enableCache") and _step(task) in PRIVATE + DECIDING:
            yield f"{name} may be cached; set_caching_options(False)"


def no_cache_key(spec: Spec, _: Spec) -> Iterator[str]:
    """A cache key overrides image, code and inputs."""
    for name, task in _tasks(spec):
        if task.get("cachingOptions", {}).get("cacheKey"):
            yield f"{name} has a cache_key, which ignores image and inputs; remove it"


def no_retry(spec: Spec, _: Spec) -> Iterator[str]:
    """A retried private step, or one inside a retried DAG, is new noise on the same users."""
    retried_dags = {
        _step(task)
        for _, task in _tasks(spec)
        if task.get("retryPolicy") and f"comp-{_step(task)}" in dict(_dags(spec))
    }
    for name, task in _tasks(spec):
        if task.get("retryPolicy") and _step(task) in PRIVATE + DECIDING:
            yield f"{name} is retried; remove set_retry"
    for dag_name, dag in _dags(spec):
        if dag_name.removeprefix("comp-") in retried_dags:
            for name, task in dag["tasks"].items():
                if _step(task) in PRIVATE + DECIDING:
                    yield f"{name} lies in the retried group {dag_name}; remove set_retry"


def no_stale_import(spec: Spec, _: Spec) -> Iterator[str]:
    """An importer without reimport returns old metadata for changed data."""
    for name, executor in spec["deploymentSpec"]["executors"].items():
        importer = executor.get("importer")
        if importer is not None and not importer.get("reimport"):
            yield f"{name} imports without reimport; set reimport=True"


def images_by_digest(spec: Spec, _: Spec) -> Iterator[str]:
    """A tag can change between two steps of one run."""
    for name, executor in spec["deploymentSpec"]["executors"].items():
        image = executor.get("container", {}).get("image", "")
        if "container" in executor and not DIGEST.search(image):
            yield f"{name} uses {image}, not a digest; name the image as REF@sha256:..."


def no_secret_parameters(spec: Spec, _: Spec) -> Iterator[str]:
    """Parameters are stored in run specs, the UI and metadata."""
    for where, definitions in _input_definitions(spec):
        for name in definitions.get("parameters", {}):
            if SECRET_WORDS.search(name):
                yield f"{where} takes parameter {name}; use a secret as environment variable"


def _input_definitions(spec: Spec) -> Iterator[tuple[str, Spec]]:
    yield "the pipeline", spec["root"].get("inputDefinitions", {})
    for name, component in spec.get("components", {}).items():
        yield name, component.get("inputDefinitions", {})


def release_behind_gate(spec: Spec, _: Spec) -> Iterator[str]:
    """Every release takes the gate's verdict from the gate, and runs only if it succeeded."""
    found = False
    for dag in dict(_dags(spec)).values():
        for name, task in dag["tasks"].items():
            if _step(task) != "release-model":
                continue
            found = True
            verdict = task.get("inputs", {}).get("artifacts", {}).get("verdict", {})
            producer = verdict.get("taskOutputArtifact", {}).get("producerTask", "")
            gate = dag["tasks"].get(producer)
            if gate is None or _step(gate) != "gate-release":
                yield f"{name} does not take its verdict from gate-release; connect it"
            strategy = task.get("triggerPolicy", {}).get("strategy")
            if strategy == "ALL_UPSTREAM_TASKS_COMPLETED":
                yield f"{name} runs even if the gate fails; remove ignore_upstream_failure"
    if not found:
        yield "there is no release-model step; a pipeline without release needs no gate"


def no_raw_outputs(spec: Spec, _: Spec) -> Iterator[str]:
    """Raw data is written below the private root, never as an artifact of the pipeline."""
    for name, component in spec.get("components", {}).items():
        outputs = component.get("outputDefinitions", {}).get("artifacts", {})
        for output in outputs:
            if any(word in output for word in RAW_WORDS):
                yield f"{name} puts out {output}, which is Raw; write it below the private root"


def harmless_exit_handlers(spec: Spec, _: Spec) -> Iterator[str]:
    """An exit handler also runs after a failure: it must not release, account or decide."""
    for name, task in _tasks(spec):
        strategy = task.get("triggerPolicy", {}).get("strategy")
        if strategy == "ALL_UPSTREAM_TASKS_COMPLETED" and _step(task) in PRIVATE + DECIDING:
            yield f"{name} runs as an exit handler; take it out"


def strict_protos(spec: Spec, platform: Spec) -> Iterator[str]:
    """Both documents parse strictly: no field that the backend would silently drop."""
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as executor_pb2
    from kfp.pipeline_spec import pipeline_spec_pb2 as spec_pb2

    # Generated modules: their messages exist at run time only, so the type checker cannot see them.
    pipeline_spec, executor_config = vars(spec_pb2), vars(executor_pb2)
    try:
        json_format.ParseDict(spec, pipeline_spec["PipelineSpec"]())
        kubernetes = platform.get("platforms", {}).get("kubernetes", {})
        for executor in kubernetes.get("deploymentSpec", {}).get("executors", {}).values():
            json_format.ParseDict(executor, executor_config["KubernetesExecutorConfig"]())
    except json_format.ParseError as error:
        yield f"the specification has a field that Kubeflow does not know: {error}"


RULES: tuple[Callable[[Spec, Spec], Iterator[str]], ...] = (
    no_cache,
    no_cache_key,
    no_retry,
    no_stale_import,
    images_by_digest,
    no_secret_parameters,
    release_behind_gate,
    no_raw_outputs,
    harmless_exit_handlers,
    strict_protos,
)
