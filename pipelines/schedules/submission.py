"""Submits one run, and never a second one while an earlier one of the same configuration may live.

Each submission has an idempotency key. Before a run is created, and again after a call whose
outcome is unknown, the run or Workflow with the key is searched.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.config.parameters import run_config
from fedemb.errors import ConfigError, StorageError
from fedemb.foundation.canonical_json import Json, json_digest
from fedemb.pipelines.schedules.cluster_objects import ClusterObjects, Workflow
from fedemb.pipelines.schedules.kubeflow import Kubeflow, ListedRun, OutcomeUnknown
from fedemb.pipelines.schedules.package import (
    check_package,
    fitted,
    run_arguments,
    version_name,
)
from fedemb.pipelines.schedules.taken_over import KEY_LABEL, Earlier, earlier_outputs, for_run
from fedemb.pipelines.steps import pipeline_of

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
        return json_digest([pipeline_of(self.config).name, bound, resume])[:16]


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
            if not alive.state and workflows is not None:
                _refuse_without_workflow(alive, workflows)
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


def _refuse_without_workflow(run: ListedRun, workflows: Sequence[Workflow]) -> None:
    """Refuses a listed run that no Workflow belongs to: it will never end by itself."""
    if run.run_id not in {workflow.run_id for workflow in workflows}:
        raise StorageError(
            f"Run {run.run_id} of this configuration is listed without a state, and its Workflow "
            "was deleted, so it never ends. Pass --again to start another one."
        )


def _create(kubeflow: Kubeflow, request: Request, name: str, earlier: Earlier | None) -> str:
    """Uploads the version of a request, if need be, and creates its run."""
    pipeline, texts = pipeline_of(request.config).name, dict[str, str]()
    if earlier is not None:
        texts["config"] = run_config(request.arguments).model_dump_json()
    experiment_id = kubeflow.experiment(request.experiment or pipeline)
    with tempfile.TemporaryDirectory() as folder:
        package = for_run(
            request.package, Path(folder), request.key, request.resume, earlier, texts
        )
        version = version_name(request.config.policy.policy_id, package, request.key)
        reference = kubeflow.version(package, pipeline, version, request.description)
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
