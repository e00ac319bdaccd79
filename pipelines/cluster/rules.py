"""Rules for compiled pipelines. Each rule checks the YAML, not the code that made it.

Why each: docs/cluster/reference.md#rules-of-compiled-pipelines; in short, a cached or retried
private step spends unaccounted privacy loss, and a path around the gate releases a model without a
verdict.

A step is known by the function its container runs, not by the name of its task, which anybody may
choose. Which steps may be cached and what each may put out are their declarations; what is not
declared counts as private: the rules fail closed.

Reads parsed YAML and JSON of Kubernetes and Kubeflow by path; absent fields are empty.

A field of another type than expected raises a TypeError, so a malformed file is never taken for one
without the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from fedemb.documents.artifacts import Noised, Public
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.foundation.files import read_regular
from fedemb.foundation.step_logging import EVERYTHING

if TYPE_CHECKING:
    from fedemb.runtime.step import Step

T = TypeVar("T", JsonObject, list[Json], str)


def value_at(tree: Json, *path: str) -> Json:
    """Returns the value at a path of names; None if it is absent or null."""
    for name in path:
        if tree is None:
            return None
        tree = _checked(tree, dict[str, Json]()).get(name)
    return tree


def object_at(tree: Json, *path: str) -> JsonObject:
    """Returns the object at a path; changes to an existing one change the tree."""
    return _checked(value_at(tree, *path), {})


def list_at(tree: Json, *path: str) -> list[Json]:
    """Returns the list at a path."""
    return _checked(value_at(tree, *path), [])


def objects_at(tree: Json, *path: str) -> list[JsonObject]:
    """Returns the objects of the list at a path."""
    return [_checked(item, {}) for item in list_at(tree, *path)]


def objects_of(fields: JsonObject) -> list[tuple[str, JsonObject]]:
    """Returns name and object of each field."""
    return [(name, _checked(item, {})) for name, item in fields.items()]


def text_at(tree: Json, *path: str) -> str:
    """Returns the text at a path."""
    return _checked(value_at(tree, *path), "")


def _checked(value: Json, empty: T) -> T:
    if value is None:
        return empty
    if not isinstance(value, type(empty)):
        raise TypeError(f"{value!r:.80} is not a {type(empty).__name__}")
    return value


SECRET_WORDS = re.compile(r"(secret|password|token|private_key|access_key|credential)", re.I)
SECRET_VALUES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|://[^/\s:@]+:[^/@\s]+@"
)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
STEP_LABEL = "fedemb.dev/step"
RUNS_AFTER_FAILURE = "ALL_UPSTREAM_TASKS_COMPLETED"


def read_compiled(path: Path) -> list[JsonObject]:
    """The documents of a compiled pipeline, by libyaml where it is there: ten times faster."""
    return list(yaml.load_all(read_regular(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _declared() -> dict[str, Step]:
    """Every step by its name in Kubeflow. Read when a rule asks: it imports kfp."""
    from fedemb.pipelines.steps import all_steps

    return {step.slug: step for step in all_steps().values()}


def violations(documents: Sequence[JsonObject]) -> list[str]:
    """Returns every broken rule as a sentence; an empty list is a safe pipeline."""
    spec = documents[0]
    platform = documents[1] if len(documents) > 1 else {}
    return [problem for rule in RULES for problem in rule(spec, platform)]


def dags_of(spec: JsonObject) -> list[JsonObject]:
    """Returns name -> task of the root and of every group.

    Raises:
      TypeError: the root has no task.
    """
    root = object_at(spec, "root", "dag", "tasks")
    if not root:
        raise TypeError("the pipeline has no task")
    return [root, *(object_at(item, "dag", "tasks") for item in _components(spec).values())]


def _tasks(spec: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    for tasks in dags_of(spec):
        yield from objects_of(tasks)


def _components(spec: JsonObject) -> dict[str, JsonObject]:
    return dict(objects_of(object_at(spec, "components")))


def component_of(spec: JsonObject, task: JsonObject) -> JsonObject:
    """Returns the component that a task runs."""
    return object_at(spec, "components", text_at(task, "componentRef", "name"))


def executors_of(spec: JsonObject) -> dict[str, JsonObject]:
    """Returns name -> executor."""
    return dict(objects_of(object_at(spec, "deploymentSpec", "executors")))


def options_of(platform: JsonObject) -> JsonObject:
    """Returns executor -> what the platform document says of its pod."""
    return object_at(platform, "platforms", "kubernetes", "deploymentSpec", "executors")


def variables_of(executor: JsonObject) -> list[JsonObject]:
    """Returns the plain environment variables of an executor."""
    return objects_at(executor, "container", "env")


def function_of(executor: JsonObject) -> str:
    """Returns the function that a container runs, as kfp's executor gets it; empty: not ours."""
    for name, value in pairwise(list_at(executor, "container", "args")):
        if name == "--function_to_execute":
            return str(value).replace("_", "-")
    return ""


def _step(spec: JsonObject, task: JsonObject) -> str:
    """The step a task runs; the component's own name, if that is a group or none of ours."""
    label = text_at(component_of(spec, task), "executorLabel")
    function = function_of(executors_of(spec).get(label, {}))
    return function or text_at(task, "componentRef", "name").removeprefix("comp-")


def _inside(spec: JsonObject, task: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """A task's own tasks, however deep the groups."""
    for name, inner in objects_of(object_at(component_of(spec, task), "dag", "tasks")):
        yield name, inner
        yield from _inside(spec, inner)


def _private(spec: JsonObject, task: JsonObject) -> bool:
    """Whether a task is a step that must run exactly once; groups are judged by what they hold."""
    step = _declared().get(_step(spec, task))
    return "dag" not in component_of(spec, task) and (step is None or not step.cached)


def no_cache(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """Steps that touch private data or decide about it always run, and so does what holds them."""
    for name, task in _tasks(spec):
        if not value_at(task, "cachingOptions", "enableCache"):
            continue
        if _private(spec, task):
            yield f"{name} may be cached; set_caching_options(False)"
        for inner, held in _inside(spec, task):
            if _private(spec, held):
                yield f"{inner} is in the cached group {name}; set_caching_options(False)"


def no_cache_key(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """A cache key overrides image, code and inputs."""
    for name, task in _tasks(spec):
        if value_at(task, "cachingOptions", "cacheKey"):
            yield f"{name} has a cache_key, which ignores image and inputs; remove it"


def no_retry(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """A retried private step, or one at any depth of a retried group, is new noise on its users.

    Silence is not enough: Kubeflow's default configuration retries every template that says
    nothing. A policy of no retries replaces it.
    """
    for name, task in _tasks(spec):
        retried = value_at(task, "retryPolicy", "maxRetryCount")
        if _private(spec, task) and (task.get("retryPolicy") is None or retried):
            yield f"{name} may be retried; set_retry(0) overrides what the cluster would do"
        for inner, held in _inside(spec, task):
            if retried and _private(spec, held):
                yield f"{inner} is in the retried group {name}; remove set_retry"


def no_repetition(spec: JsonObject, _: JsonObject) -> Iterator[str]:
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


def no_stale_import(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """An importer without reimport returns old metadata for changed data."""
    for name, executor in executors_of(spec).items():
        if "importer" in executor and not value_at(executor, "importer", "reimport"):
            yield f"{name} imports without reimport; set reimport=True"


def images_by_digest(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """A tag can change between two steps of one run."""
    for name, executor in executors_of(spec).items():
        image = text_at(executor, "container", "image")
        if "container" in executor and not DIGEST.search(image):
            yield f"{name} uses {image}, not a digest; name the image as REF@sha256:..."


def no_secrets(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """Parameters and plain variables are stored in run specs, the UI and metadata."""
    for where, definitions in _input_definitions(spec):
        for name in object_at(definitions, "parameters"):
            if SECRET_WORDS.search(name):
                yield f"{where} takes parameter {name}; use a secret as environment variable"
    for name, executor in executors_of(spec).items():
        for variable in variables_of(executor):
            if SECRET_WORDS.search(text_at(variable, "name")):
                yield (
                    f"{name} holds {variable['name']} in plain text; name a secret of the cluster "
                    "in the profile's `secrets`"
                )
    if any(SECRET_VALUES.search(text) for text in _texts(spec)):
        yield "the file contains a key or a password; use a secret of the cluster instead"


def _input_definitions(spec: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    yield "the pipeline", object_at(spec, "root", "inputDefinitions")
    for name, component in _components(spec).items():
        yield name, object_at(component, "inputDefinitions")


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def release_behind_gate(spec: JsonObject, platform: JsonObject) -> Iterator[str]:
    """Every release takes the gate's verdict from the gate, and runs only if it succeeded."""
    del platform
    found = False
    for tasks in dags_of(spec):
        for name, task in objects_of(tasks):
            step, inputs = _step(spec, task), object_at(task, "inputs", "parameters")
            if step != "release-model":
                if "releases" in inputs and not list(_inside(spec, task)):
                    yield f"{name} is given the store of releases; only release-model may have it"
                continue
            found = True
            verdict = object_at(task, "inputs", "artifacts", "verdict")
            producer = text_at(verdict, "taskOutputArtifact", "producerTask")
            if producer not in tasks or _step(spec, object_at(tasks, producer)) != "gate-release":
                yield f"{name} does not take its verdict from gate-release; connect it"
            elif producer not in list_at(task, "dependentTasks"):
                yield f"{name} does not wait for {producer}; connect it"
            if _runs_after_failure(task):
                yield f"{name} runs even if the gate fails; remove ignore_upstream_failure"
    if not found:
        yield "no release-model step found; remove the gate from a pipeline without release"


def _runs_after_failure(task: JsonObject) -> bool:
    return value_at(task, "triggerPolicy", "strategy") == RUNS_AFTER_FAILURE


def no_raw_outputs(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """Raw data is written below the private root; what a step may put out is a closed list."""
    for name, component in _components(spec).items():
        if "dag" in component:
            continue
        step = _declared().get(_step(spec, {"componentRef": {"name": name}}))
        kinds = {} if step is None else step.outputs
        allowed = {output for output, kind in kinds.items() if issubclass(kind, Noised | Public)}
        outputs = object_at(component, "outputDefinitions")
        for output in sorted(set(object_at(outputs, "artifacts")) - allowed):
            yield (
                f"{name} puts out {output}, which is not known to be free of Raw; write it below "
                "the private root, or declare it in `outputs` of its @step after review"
            )
        for output in sorted(set(object_at(outputs, "parameters")) - allowed):
            yield f"{name} puts out the parameter {output}, which metadata keeps; take it out"


def harmless_exit_handlers(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """An exit handler also runs after a failure: it must not release, account or decide.

    A step that is declared for the end has no right to anything such a step would need.
    """
    for name, task in _tasks(spec):
        if not _runs_after_failure(task):
            continue
        for inner, held in ((name, task), *_inside(spec, task)):
            step = _declared().get(_step(spec, held))
            if step is not None and not step.at_exit:
                yield f"{inner} runs as an exit handler; take it out"


def labelled_by_step(spec: JsonObject, platform: JsonObject) -> Iterator[str]:
    """The cluster gives a pod the rights its label names, so the label is the step it runs."""
    options = options_of(platform)
    for name, executor in executors_of(spec).items():
        label = value_at(options, name, "podMetadata", "labels", STEP_LABEL)
        step = function_of(executor)
        if label != (step if step in _declared() else None):
            yield (
                f"{name} runs {step or 'none of our steps'} under the label {label}; compile it "
                "with `fedemb compile`"
            )


def restricted_pods(spec: JsonObject, platform: JsonObject) -> Iterator[str]:
    """No pod runs as root, and what it may write to is named: the root is read-only.

    Kubeflow's compiler itself drops all capabilities, forbids escalation and sets the seccomp
    profile; a pipeline can say no more than this.
    """
    options = options_of(platform)
    for name, executor in executors_of(spec).items():
        if "container" not in executor:
            continue
        held = object_at(options, name)
        context = object_at(held, "securityContext")
        user = int(str(context.get("runAsUser", 1)))
        if context.get("runAsNonRoot") is not True or user == 0:
            yield f"{name} may run as root; compile it with `fedemb compile`"
        mounts = objects_at(held, "emptyDirMounts")
        if not any(volume.get("mountPath") == "/tmp" for volume in mounts):
            yield f"{name} has no volume at /tmp, the one place it may write; compile it again"


def no_debug_pause(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """A paused pod waits with its keys and data until somebody looks in."""
    for name, executor in executors_of(spec).items():
        for variable in variables_of(executor):
            if text_at(variable, "name").startswith("ARGO_DEBUG_PAUSE"):
                yield f"{name} pauses for debugging; remove set_debug_pause"


def closed_logs(spec: JsonObject, _: JsonObject) -> Iterator[str]:
    """Requires that private steps suppress library output; only a data owner's machine may show it.

    See `fedemb.foundation.step_logging`.
    """
    for name, executor in executors_of(spec).items():
        for variable in variables_of(executor):
            if variable["name"] == EVERYTHING:
                yield f"{name} logs everything; take {EVERYTHING} out of the profile"


def strict_protos(spec: JsonObject, platform: JsonObject) -> Iterator[str]:
    """Both documents parse strictly: no field that the backend would silently drop."""
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2 as executor_pb2
    from kfp.pipeline_spec import pipeline_spec_pb2 as spec_pb2

    # Generated modules: their messages exist at run time only, so the type checker cannot see them.
    pipeline_spec, executor_config = vars(spec_pb2), vars(executor_pb2)
    try:
        json_format.ParseDict(spec, pipeline_spec["PipelineSpec"]())
        for executor in options_of(platform).values():
            json_format.ParseDict(
                object_at(executor), executor_config["KubernetesExecutorConfig"]()
            )
    except json_format.ParseError as error:
        yield f"the specification has a field that Kubeflow does not know: {error}"


RULES: tuple[Callable[[JsonObject, JsonObject], Iterator[str]], ...] = (
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
