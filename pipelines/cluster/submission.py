"""Submits one run, and never a second one while an earlier one of the same configuration may live.

Each submission has an idempotency key. Before a run is created, and again after a call whose
outcome is unknown, the run or Workflow with the key is searched.

The copy of a package that one run has: its label, and the outputs of an earlier run.

A task that is not run again is replaced by one importer for each of its artifacts. Nothing is
trusted for being imported: account, gate and release verify signatures and digests of all of it.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedemb.config import RunConfig
from fedemb.config.parameters import run_config
from fedemb.errors import ConfigError, InputError, StorageError
from fedemb.foundation.canonical_json import Json, JsonObject, json_digest
from fedemb.foundation.files import read_regular
from fedemb.pipelines.cluster.kubeflow import Kubeflow, ListedRun, OutcomeUnknown
from fedemb.pipelines.cluster.kubernetes import ClusterObjects, Workflow
from fedemb.pipelines.cluster.package import check_package, fitted, run_arguments, version_name
from fedemb.pipelines.cluster.rules import (
    component_of,
    dags_of,
    executors_of,
    list_at,
    object_at,
    objects_of,
    options_of,
    read_compiled,
    text_at,
)
from fedemb.pipelines.steps import PIPELINE
from fedemb.runtime.step import Step
from fedemb.storage import open_store

LAST = "gate_release"
"""A release takes its verdict from a gate of the same run, so no run starts after the gate."""
NO_RETRY = {"backoffDuration": "0s", "backoffFactor": 2.0, "backoffMaxDuration": "3600s"}
"""Compiled form of `set_retry(0)`."""
KEY_LABEL = "fedemb.dev/idempotency-key"
"""Label of every pod of a submitted run: `kubectl get pods -l fedemb.dev/idempotency-key=KEY`."""


@dataclass(frozen=True)
class Earlier:
    """Outputs of finished steps that a run reuses."""

    listed: Mapping[str, Sequence[str]]
    """Folder of each run that may hold them, the newest first -> names of its files."""
    found: Mapping[str, Mapping[str, str]]
    """Task of a step -> artifact -> address."""

    @property
    def artifacts(self) -> dict[str, str]:
        """Artifact -> address."""
        return {name: uri for of_step in self.found.values() for name, uri in of_step.items()}


def earlier_outputs(
    kubeflow: Kubeflow, cluster: ClusterObjects, config: RunConfig, run_id: str, start: str
) -> Earlier:
    """Finds the artifacts of the steps of an earlier run before a step, below the public root.

    Kubeflow writes to `<root>/<pipeline>/<run>/<task>/<execution>/<artifact>`. Runs that resumed
    the earlier one may hold newer ones.

    Args:
      kubeflow: namespace of the Kubeflow Pipelines API.
      cluster: Kubernetes objects of the namespace.
      config: configuration of the run; its public root, if null, is that of the namespace.
      run_id: Kubeflow's id of the earlier run.
      start: the step.

    Raises:
      ConfigError: the pipeline has no such step, it is the first or comes after the gate, or the
        public root is not known.
      InputError: an artifact is missing, or two executions of one step wrote it.
      StorageError: Kubeflow or the public root cannot be read.
    """
    pipeline = PIPELINE
    allowed = pipeline.steps[1 : pipeline.steps.index(LAST) + 1]
    if start not in allowed:
        raise ConfigError(
            f"a run cannot be resumed from {start}. Pass --from with one of {', '.join(allowed)}."
        )
    root = config.storage.public_root or cluster.pipeline_root()
    if not root:
        raise ConfigError(
            "the public root of the earlier run is not known: kfp-launcher cannot be read. Set "
            "storage.public_root, or KUBECONFIG."
        )
    runs = [*(run.run_id for run in kubeflow.runs_named(f"(resumes {run_id})")), run_id]
    folders = [f"{root.rstrip('/')}/{pipeline.name}/{run}" for run in runs]
    listed = {folder: open_store(folder).list() for folder in folders}
    before = pipeline.steps[: pipeline.steps.index(start)]
    steps = [step for step in pipeline.declared() if step.name in before]
    return Earlier(listed, {step.slug: _of_step(listed, step) for step in steps})


def _of_step(listed: Mapping[str, Sequence[str]], step: Step) -> dict[str, str]:
    """Artifact -> address, of the newest run that has all artifacts of a step."""
    for folder, names in listed.items():
        places = {name: _executions(names, step.slug, name) for name in step.files}
        for name, found in places.items():
            if len(found) > 1:
                raise InputError(
                    f"{name} of {step.name} was written by {len(found)} executions at {folder}/"
                    f"{step.slug}. Resume the run without --from."
                )
        if all(places.values()):
            return {name: f"{folder}/{found[0]}" for name, found in places.items()}
    raise InputError(
        f"outputs of {step.name} were not found at {', '.join(listed)}. Resume the run without "
        "--from."
    )


def _executions(names: Sequence[str], task: str, artifact: str) -> list[str]:
    pattern = re.compile(rf"({re.escape(task)}/[^/]+/{re.escape(artifact)})(?:/.*)?")
    return sorted({match[1] for name in names if (match := pattern.fullmatch(name))})


def for_run(  # noqa: PLR0917 - what differs from the package
    package: Path,
    folder: Path,
    key: str,
    resume: str | None,
    earlier: Earlier | None,
    texts: Mapping[str, str],
) -> Path:
    """Writes a copy of a checked package for one run.

    Its pods have the key as a label. A run has the id that Kubeflow assigns, so a new submission is
    a new run. With the id of a crashed run, the steps find its reservation and its committed
    rounds; they refuse if code, configuration or data differ.

    Args:
      package: compiled pipeline.
      folder: folder of the copy.
      key: idempotency key of the submission.
      resume: id of the run that is resumed; None: none.
      earlier: outputs of steps that do not run again; None: all run.
      texts: name -> value of the outputs of those steps that are texts.

    Raises:
      ConfigError: the run id is not valid, or the package does not read it from Kubeflow.
    """
    from kfp.dsl import PIPELINE_JOB_ID_PLACEHOLDER

    text = read_regular(package).decode()
    if resume is not None:
        if not re.fullmatch(r"[0-9A-Za-z][\w.-]{0,63}", resume):
            raise ConfigError(
                f"{resume!r} is not a run id. Pass a run id from `fedemb ledger show`."
            )
        if f"'{PIPELINE_JOB_ID_PLACEHOLDER}'" not in text:
            raise ConfigError(
                f"Package {package.name} does not read the run id from Kubeflow. Compile the "
                "package again."
            )
        text = text.replace(f"'{PIPELINE_JOB_ID_PLACEHOLDER}'", f"'{resume}'")
    copy = folder / package.name
    copy.write_text(text)
    spec, platform = read_compiled(copy)
    for name, executor in executors_of(spec).items():
        if "container" in executor:
            metadata = object_at(options_of(platform)[name]).setdefault("podMetadata", {})
            object_at(object_at(metadata).setdefault("labels", {}))[KEY_LABEL] = key
    if earlier is not None:
        _take_over(spec, platform, earlier, texts)
    copy.write_text(yaml.safe_dump_all([spec, platform], sort_keys=True))
    return copy


def _take_over(
    spec: JsonObject, platform: JsonObject, earlier: Earlier, texts: Mapping[str, str]
) -> None:
    """Replaces steps by importers of their outputs, and texts by their values."""
    found = earlier.found
    for tasks in dags_of(spec):
        for _, task in objects_of(tasks):  # tells the exit step where the documents are
            if given := object_at(task, "inputs", "parameters", "reused"):
                reused = json.dumps(earlier.artifacts, sort_keys=True)
                given["runtimeValue"] = {"constant": reused}
    tasks = next(dag for dag in dags_of(spec) if found.keys() <= dag.keys())
    kinds = {slug: _outputs(spec, object_at(tasks, slug)) for slug in found}
    for slug in found:
        component = object_at(spec, "components").pop(
            text_at(tasks.pop(slug), "componentRef", "name")
        )
        executor = text_at(component, "executorLabel")
        del object_at(spec, "deploymentSpec", "executors")[executor]
        options_of(platform).pop(executor, None)
    for _, task in list(objects_of(tasks)):
        for value in object_at(task, "inputs", "parameters").values():
            source = object_at(value, "taskOutputParameter")
            if source.get("producerTask") in found:
                constant = texts[text_at(source, "outputParameterKey")]
                object_at(value).clear()
                object_at(value)["runtimeValue"] = {"constant": constant}
        for value in object_at(task, "inputs", "artifacts").values():
            source = object_at(value, "taskOutputArtifact")
            slug, artifact = text_at(source, "producerTask"), text_at(source, "outputArtifactKey")
            if slug in found:
                name = f"import-{slug}-{artifact}".replace("_", "-")
                source |= {"producerTask": name, "outputArtifactKey": "artifact"}
                kind = object_at(kinds[slug], artifact, "artifactType")
                _add_importer(spec, tasks, name, found[slug][artifact], kind)
        _rewire(task, {*found})


def _outputs(spec: JsonObject, task: JsonObject) -> JsonObject:
    return object_at(component_of(spec, task), "outputDefinitions", "artifacts")


def _rewire(task: JsonObject, gone: set[str]) -> None:
    """Makes a task wait for what it takes now."""
    taken = object_at(task, "inputs", "artifacts").values()
    waits = {text_at(value, "taskOutputArtifact", "producerTask") for value in taken}
    waits |= {str(name) for name in list_at(task, "dependentTasks")} - gone
    task.pop("dependentTasks", None)
    if waits:
        task["dependentTasks"] = [*sorted(waits)]


def _add_importer(
    spec: JsonObject, tasks: JsonObject, name: str, uri: str, kind: JsonObject
) -> None:
    """Adds what the compiler makes of `dsl.importer(uri, kind, reimport=True)`."""
    plain: JsonObject = {key: kind[key] for key in ("schemaTitle", "schemaVersion")}
    object_at(spec, "components")[f"comp-{name}"] = {
        "executorLabel": f"exec-{name}",
        "inputDefinitions": {"parameters": {"uri": {"parameterType": "STRING"}}},
        "outputDefinitions": {"artifacts": {"artifact": {"artifactType": plain}}},
    }
    object_at(spec, "deploymentSpec", "executors")[f"exec-{name}"] = {
        "importer": {"artifactUri": {"constant": uri}, "reimport": True, "typeSchema": plain}
    }
    tasks[name] = {
        "cachingOptions": {},
        "componentRef": {"name": f"comp-{name}"},
        "inputs": {"parameters": {"uri": {"runtimeValue": {"constant": uri}}}},
        "retryPolicy": {**NO_RETRY},
        "taskInfo": {"name": name},
    }


_NO_RUN = ("beam_options", "mlflow")
"""Arguments that change neither the model nor the charge of a run."""
WAITS = (0.0, 2.0, 5.0)
"""Seconds before each search for a run whose creation gave no answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run that is to be started.

    Attributes:
      package: YAML of `fedemb compile`.
      experiment: None: the pipeline's name.
      description: guarantee of the run, for people who compare runs. The run has as much of it as
        Kubeflow stores, the version of the pipeline all of it.
      service_account: account that drives the run.
      beam_options: options of the engine that partitions the users.
      mlflow: tracking server that receives the ended run; None: none.
      resume: id of an earlier run, whose reservation and rounds this one uses.
      start: first step that runs again; the outputs of those before it are imported. None: all
        run, and find what is reserved and committed.
    """

    package: Path
    config: RunConfig
    experiment: str | None = None
    description: str = ""
    service_account: str | None = None
    beam_options: tuple[str, ...] = ()
    mlflow: str | None = None
    resume: str | None = None
    start: str | None = None

    @property
    def arguments(self) -> dict[str, Json]:
        """Arguments of the pipeline; see `run_arguments`."""
        return run_arguments(self.config, self.beam_options, self.mlflow)

    @property
    def key(self) -> str:
        """Idempotency key of all submissions of one configuration: 16 hexadecimal digits.

        A package that was compiled again, other Beam options and another MLflow server do not
        change the key: the run would train the same model and charge the same users.
        """
        resume = f"{self.resume} from {self.start}" if self.start else self.resume
        bound = {name: value for name, value in self.arguments.items() if name not in _NO_RUN}
        return json_digest([PIPELINE.name, bound, resume])[:16]


@dataclass(frozen=True)
class Submitted:
    """The run of a request."""

    run_id: str
    started: bool
    """False: it was submitted before and has not ended; nothing was started."""
    state: str = ""
    ended_before: tuple[ListedRun, ...] = ()
    """Earlier runs of the same configuration, which have ended."""


def submit(
    kubeflow: Kubeflow, request: Request, cluster: ClusterObjects, *, again: bool = False
) -> Submitted:
    """Starts one run, unless an earlier one of the same configuration may still be alive.

    `again`: start a run although an earlier one may be alive.

    Raises:
      ConfigError: the package breaks a rule or does not run this task, or a store is not named.
      StorageError: Kubeflow does not answer or refuses; whether a run was started is in the
        message.
    """
    check_package(request.package, config=request.config)
    key = request.key
    earlier = list(kubeflow.runs_named(key))
    workflows = cluster.workflows(key)
    versions = kubeflow.version_names().values()
    if not again:
        if alive := next((run for run in earlier if run.alive), None):
            driven = workflows is None or alive.run_id in {item.run_id for item in workflows}
            if not alive.state and not driven:  # it will never end by itself
                raise StorageError(
                    f"Run {alive.run_id} of this configuration is listed without a state, and its "
                    "Workflow was deleted, so it never ends. Pass --again to start another one."
                )
            return Submitted(alive.run_id, started=False, state=alive.state)
        _refuse_unlisted(request, earlier, workflows, versions, kubeflow)
    name = _name(request, key, earlier, workflows or ())
    finished = None
    if request.start is not None:
        if request.resume is None:
            raise ConfigError("--from resumes an earlier run. Pass its id with --resume.")
        finished = earlier_outputs(kubeflow, cluster, request.config, request.resume, request.start)
    try:
        run_id = _create(kubeflow, request, name, finished)
    except OutcomeUnknown as error:
        run_id = _found_after(kubeflow, cluster, name, key, error)
    return Submitted(run_id, started=True, ended_before=tuple(earlier))


def _refuse_unlisted(
    request: Request,
    earlier: Sequence[ListedRun],
    workflows: Sequence[Workflow] | None,
    versions: Iterable[str],
    kubeflow: Kubeflow,
) -> None:
    """Refuses where an earlier submission may run although Kubeflow's list does not show it."""
    key, listed = request.key, {run.run_id for run in earlier}
    for workflow in workflows or ():
        if not workflow.ended and workflow.run_id not in listed:
            raise StorageError(_unlisted(workflow, kubeflow.namespace))
    uploaded = any(name.endswith(f"-{key}") for name in versions)
    if workflows is None and uploaded and not earlier:
        raise StorageError(
            "An earlier submission of this configuration reached Kubeflow, and its run may be "
            "alive: it is not listed, and Workflows are not readable from here. "
            f"{_find_created_run(kubeflow.namespace, key)}. If no pod runs, pass --again."
        )


def _create(kubeflow: Kubeflow, request: Request, name: str, earlier: Earlier | None) -> str:
    """Uploads the version of a request, if need be, and creates its run."""
    texts = dict[str, str]()
    if earlier is not None:
        texts["config"] = run_config(request.arguments).model_dump_json()
    experiment_id = kubeflow.experiment(request.experiment)
    with tempfile.TemporaryDirectory() as folder:
        package = for_run(
            request.package, Path(folder), request.key, request.resume, earlier, texts
        )
        version = version_name(request.config.policy.policy_id, package, request.key)
        reference = kubeflow.version(package, version, request.description)
    return kubeflow.create_run(
        reference,
        experiment_id=experiment_id,
        name=name,
        description=fitted(request.description),
        arguments=request.arguments,
        pipeline_root=request.config.storage.public_root,
        service_account=request.service_account,
    )


def _name(
    request: Request, key: str, earlier: Sequence[ListedRun], workflows: Sequence[Workflow]
) -> str:
    """Returns a name that no earlier run of the key has: policy, model, key and number."""
    names = [*(run.name for run in earlier), *(workflow.run_name for workflow in workflows)]
    numbers = [int(found[1]) for name in names if (found := re.search(rf"{key}-(\d+)", name))]
    number = max(numbers, default=0) + 1
    name = f"{request.config.policy.policy_id} {request.config.release_name} {key}-{number}"
    return fitted(f"{name} (resumes {request.resume})" if request.resume else name)


def _found_after(
    kubeflow: Kubeflow, cluster: ClusterObjects, name: str, key: str, error: OutcomeUnknown
) -> str:
    """Returns the id of a run that was created although the call failed.

    Raises:
      StorageError: only its Workflow exists, or nothing was found.
    """
    workflows: list[Workflow] | None = None
    for seconds in WAITS:
        time.sleep(seconds)
        try:
            run = next((run for run in kubeflow.runs_named(key) if run.name == name), None)
        except StorageError:
            run = None
        if run is not None:
            return run.run_id
        workflows = cluster.workflows(name)
        if workflows:
            raise StorageError(f"{error}. {_unlisted(workflows[0], kubeflow.namespace)}") from error
    if workflows is None:
        raise StorageError(
            f"{error}. Whether the run was started is unknown: Workflows cannot be read from here. "
            f"{_find_created_run(kubeflow.namespace, key)}, then submit again."
        ) from error
    raise StorageError(
        f"{error}. No run was started: neither a run nor a Workflow has the key {key}. "
        "Submit again."
    ) from error


def _find_created_run(namespace: str, key: str) -> str:
    return f"Run `kubectl -n {namespace} get pods -l {KEY_LABEL}={key}`"


def _unlisted(workflow: Workflow, namespace: str) -> str:
    return (
        f"Workflow {workflow.name} (run {workflow.run_id}) exists, although Kubeflow's list does "
        "not show the run: it may be charged and may release. Wait until it ends, or stop it with "
        f"`kubectl -n {namespace} delete workflow {workflow.name}`; then submit again."
    )
