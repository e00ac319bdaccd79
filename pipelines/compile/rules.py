"""Rules for compiled pipelines. Each rule checks the YAML, not the code that made it.

Why each: docs/explanation/platform.md#rules; in short, a cached or retried private step spends
unaccounted privacy loss, and a path around the gate releases a model without a verdict.

A step is known by the function its container runs, not by the name of its task, which anybody may
choose. Which steps may be cached and what each may put out are their declarations; what is not
declared counts as private: the rules fail closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedemb.documents.artifacts import Noised, Public
from fedemb.foundation.step_logging import EVERYTHING

if TYPE_CHECKING:
    from fedemb.runtime.step import Step

SECRET_WORDS = re.compile(r"(secret|password|token|private_key|access_key|credential)", re.I)
SECRET_VALUES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|://[^/\s:@]+:[^/@\s]+@"
)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
STEP_LABEL = "fedemb.dev/step"
RUNS_AFTER_FAILURE = "ALL_UPSTREAM_TASKS_COMPLETED"

_MAINTENANCE = {"delete-expired", "watch-budget"}
"""Steps of pipelines that train and release nothing."""

Spec = dict[str, Any]


def read_compiled(path: Path) -> list[Spec]:
    """The documents of a compiled pipeline, by libyaml where it is there: ten times faster."""
    return list(yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _declared() -> dict[str, Step]:
    """Every step by its name in Kubeflow. Read when a rule asks: it imports kfp."""
    from fedemb.pipelines.steps import all_steps

    return {step.slug: step for step in all_steps().values()}


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
    for _, dag in _dags(spec):
        yield from dag["tasks"].items()


def function_of(executor: Spec) -> str:
    """Returns the function that a container runs, as kfp's executor gets it; empty: not ours."""
    arguments = executor.get("container", {}).get("args", [])
    for name, value in pairwise(arguments):
        if name == "--function_to_execute":
            return value.replace("_", "-")
    return ""


def _step(spec: Spec, task: Spec) -> str:
    """The step a task runs; the component's own name, if that is a group or none of ours."""
    name = task["componentRef"]["name"]
    label = spec.get("components", {}).get(name, {}).get("executorLabel", "")
    executor = spec["deploymentSpec"]["executors"].get(label, {})
    return function_of(executor) or name.removeprefix("comp-")


def _executor_options(platform: Spec) -> dict[str, Spec]:
    """Executor -> what the platform document says of its pod."""
    kubernetes = platform.get("platforms", {}).get("kubernetes", {})
    return kubernetes.get("deploymentSpec", {}).get("executors", {})


def _inside(spec: Spec, task: Spec) -> Iterator[tuple[str, Spec]]:
    """A task's own tasks, however deep the groups."""
    component = spec.get("components", {}).get(task["componentRef"]["name"], {})
    for name, inner in component.get("dag", {}).get("tasks", {}).items():
        yield name, inner
        yield from _inside(spec, inner)


def _private(spec: Spec, task: Spec) -> bool:
    """Whether a task is a step that must run exactly once; groups are judged by what they hold."""
    component = spec.get("components", {}).get(task["componentRef"]["name"], {})
    step = _declared().get(_step(spec, task))
    return "dag" not in component and (step is None or not step.cached)


def no_cache(spec: Spec, _: Spec) -> Iterator[str]:
    """Steps that touch private data or decide about it always run, and so does what holds them."""
    for name, task in _tasks(spec):
        if not task.get("cachingOptions", {}).get("enableCache"):
            continue
        if _private(spec, task):
            yield f"{name} may be cached; set_caching_options(False)"
        for inner, held in _inside(spec, task):
            if _private(spec, held):
                yield f"{inner} is in the cached group {name}; set_caching_options(False)"


def no_cache_key(spec: Spec, _: Spec) -> Iterator[str]:
    """A cache key overrides image, code and inputs."""
    for name, task in _tasks(spec):
        if task.get("cachingOptions", {}).get("cacheKey"):
            yield f"{name} has a cache_key, which ignores image and inputs; remove it"


def no_retry(spec: Spec, _: Spec) -> Iterator[str]:
    """A retried private step, or one at any depth of a retried group, is new noise on its users.

    Silence is not enough: Kubeflow's default configuration retries every template that says
    nothing. A policy of no retries replaces it.
    """
    for name, task in _tasks(spec):
        policy = task.get("retryPolicy")
        if _private(spec, task) and (policy is None or policy.get("maxRetryCount")):
            yield f"{name} may be retried; set_retry(0) overrides what the cluster would do"
        for inner, held in _inside(spec, task):
            if policy and policy.get("maxRetryCount") and _private(spec, held):
                yield f"{inner} is in the retried group {name}; remove set_retry"


def no_repetition(spec: Spec, _: Spec) -> Iterator[str]:
    """A loop runs what it holds more than once, and a step that stands twice runs twice."""
    seen: dict[str, str] = {}
    for name, task in _tasks(spec):
        if task.get("parameterIterator") or task.get("artifactIterator"):
            yield f"{name} is a loop; a private step runs once, so take the loop out"
        if _private(spec, task):
            step = _step(spec, task)
            if step in seen:
                yield f"{name} runs {step} a second time (beside {seen[step]}); remove one"
            seen[step] = name


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


def no_secrets(spec: Spec, _: Spec) -> Iterator[str]:
    """Parameters and plain variables are stored in run specs, the UI and metadata."""
    for where, definitions in _input_definitions(spec):
        for name in definitions.get("parameters", {}):
            if SECRET_WORDS.search(name):
                yield f"{where} takes parameter {name}; use a secret as environment variable"
    for name, executor in spec["deploymentSpec"]["executors"].items():
        for variable in executor.get("container", {}).get("env", []):
            if SECRET_WORDS.search(variable["name"]):
                yield (
                    f"{name} holds {variable['name']} in plain text; name a secret of the cluster "
                    "in the profile's `secrets`"
                )
    if any(SECRET_VALUES.search(text) for text in _texts(spec)):
        yield "the file contains a key or a password; use a secret of the cluster instead"


def _input_definitions(spec: Spec) -> Iterator[tuple[str, Spec]]:
    yield "the pipeline", spec["root"].get("inputDefinitions", {})
    for name, component in spec.get("components", {}).items():
        yield name, component.get("inputDefinitions", {})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def release_behind_gate(spec: Spec, platform: Spec) -> Iterator[str]:
    """Every release takes the gate's verdict from the gate, and runs only if it succeeded."""
    del platform
    found = False
    for _, dag in _dags(spec):
        for name, task in dag["tasks"].items():
            if _step(spec, task) != "release-model":
                continue
            found = True
            verdict = task.get("inputs", {}).get("artifacts", {}).get("verdict", {})
            producer = verdict.get("taskOutputArtifact", {}).get("producerTask", "")
            gate = dag["tasks"].get(producer)
            if gate is None or _step(spec, gate) != "gate-release":
                yield f"{name} does not take its verdict from gate-release; connect it"
            elif producer not in task.get("dependentTasks", []):
                yield f"{name} does not wait for {producer}; connect it"
            if task.get("triggerPolicy", {}).get("strategy") == RUNS_AFTER_FAILURE:
                yield f"{name} runs even if the gate fails; remove ignore_upstream_failure"
    if not found and not {_step(spec, task) for _, task in _tasks(spec)} <= _MAINTENANCE:
        yield "no release-model step found; remove the gate from a pipeline without release"
    for _, dag in _dags(spec):
        for name, task in dag["tasks"].items():
            step, inputs = _step(spec, task), task.get("inputs", {}).get("parameters", {})
            if "releases" in inputs and step != "release-model" and not list(_inside(spec, task)):
                yield f"{name} is given the store of releases; only release-model may have it"


def no_raw_outputs(spec: Spec, _: Spec) -> Iterator[str]:
    """Raw data is written below the private root; what a step may put out is a closed list."""
    for name, component in spec.get("components", {}).items():
        if "dag" in component:
            continue
        outputs = component.get("outputDefinitions", {})
        step = _declared().get(_step(spec, {"componentRef": {"name": name}}))
        kinds = {} if step is None else step.outputs
        allowed = {output for output, kind in kinds.items() if issubclass(kind, Noised | Public)}
        for output in sorted(set(outputs.get("artifacts", {})) - allowed):
            yield (
                f"{name} puts out {output}, which is not known to be free of Raw; write it below "
                "the private root, or declare it in `outputs` of its @step after review"
            )
        for output in sorted(set(outputs.get("parameters", {})) - allowed):
            yield f"{name} puts out the parameter {output}, which metadata keeps; take it out"


def harmless_exit_handlers(spec: Spec, _: Spec) -> Iterator[str]:
    """An exit handler also runs after a failure: it must not release, account or decide.

    A step that is declared for the end has no right to anything such a step would need.
    """
    for name, task in _tasks(spec):
        if task.get("triggerPolicy", {}).get("strategy") != RUNS_AFTER_FAILURE:
            continue
        for inner, held in ((name, task), *_inside(spec, task)):
            step = _declared().get(_step(spec, held))
            if step is not None and not step.at_exit:
                yield f"{inner} runs as an exit handler; take it out"


def labelled_by_step(spec: Spec, platform: Spec) -> Iterator[str]:
    """The cluster gives a pod the rights its label names, so the label is the step it runs."""
    options = _executor_options(platform)
    for name, executor in spec["deploymentSpec"]["executors"].items():
        labels = options.get(name, {}).get("podMetadata", {}).get("labels", {})
        step = function_of(executor)
        if labels.get(STEP_LABEL) != (step if step in _declared() else None):
            yield (
                f"{name} runs {step or 'none of our steps'} under the label "
                f"{labels.get(STEP_LABEL)}; compile it with `fedemb compile`"
            )


def restricted_pods(spec: Spec, platform: Spec) -> Iterator[str]:
    """No pod runs as root, and what it may write to is named: the root is read-only.

    Kubeflow's compiler itself drops all capabilities, forbids escalation and sets the seccomp
    profile; a pipeline can say no more than this.
    """
    options = _executor_options(platform)
    for name, executor in spec["deploymentSpec"]["executors"].items():
        if "container" not in executor:
            continue
        held = options.get(name, {})
        context = held.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or int(context.get("runAsUser", 1)) == 0:
            yield f"{name} may run as root; compile it with `fedemb compile`"
        if not any(volume.get("mountPath") == "/tmp" for volume in held.get("emptyDirMounts", [])):
            yield f"{name} has no volume at /tmp, the one place it may write; compile it again"


def no_debug_pause(spec: Spec, _: Spec) -> Iterator[str]:
    """A paused pod waits with its keys and data until somebody looks in."""
    for name, executor in spec["deploymentSpec"]["executors"].items():
        for variable in executor.get("container", {}).get("env", []):
            if variable["name"].startswith("ARGO_DEBUG_PAUSE"):
                yield f"{name} pauses for debugging; remove set_debug_pause"


def closed_logs(spec: Spec, _: Spec) -> Iterator[str]:
    """Requires that private steps suppress library output; only a data owner's machine may show it.

    See `fedemb.foundation.step_logging`.
    """
    for name, executor in spec["deploymentSpec"]["executors"].items():
        for variable in executor.get("container", {}).get("env", []):
            if variable["name"] == EVERYTHING:
                yield f"{name} logs everything; take {EVERYTHING} out of the profile"


def strict_protos(spec: Spec, platform: Spec) -> Iterator[str]:
    """Both documents parse strictly: no field that the backend would silently drop."""
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as executor_pb2
    from kfp.pipeline_spec import pipeline_spec_pb2 as spec_pb2

    # Generated modules: their messages exist at run time only, so the type checker cannot see them.
    pipeline_spec, executor_config = vars(spec_pb2), vars(executor_pb2)
    try:
        json_format.ParseDict(spec, pipeline_spec["PipelineSpec"]())
        for executor in _executor_options(platform).values():
            json_format.ParseDict(executor, executor_config["KubernetesExecutorConfig"]())
    except json_format.ParseError as error:
        yield f"the specification has a field that Kubeflow does not know: {error}"


RULES: tuple[Callable[[Spec, Spec], Iterator[str]], ...] = (
    no_cache,
    no_cache_key,
    no_retry,
    no_repetition,
    no_stale_import,
    images_by_digest,
    no_secrets,
    release_behind_gate,
    no_raw_outputs,
    harmless_exit_handlers,
    labelled_by_step,
    restricted_pods,
    no_debug_pause,
    closed_logs,
    strict_protos,
)
