"""The few calls of a multi-user Kubeflow Pipelines API that schedules and submissions need.

Everything is in one namespace: its pipelines, experiments and recurring runs are read there and
nowhere else, so that teams on one cluster do not meet.

Makes the recurring runs of a namespace those of the reviewed schedules. Idempotent.

A recurring run cannot be edited. A changed one is created beside the old one, disabled; the old one
is disabled, the new one enabled, the old one deleted. Two are never enabled at once, which would
spend twice. If the connection is lost on the way, none may be enabled, and a disabled copy may be
left; the next `apply` repairs both.

A recurring run starts when it is created, not when its schedule does: Kubeflow starts the latest
slot after the start at once, also without catch-up, and that would be a run that is not planned.
For the same reason a disabled one is not enabled again, but replaced.

A recurring run whose schedule is no longer in the folder is disabled, never deleted. One without
our marker in its description belongs to others and is left alone. Copies are replaced with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from fedemb.errors import ConfigError, InputError, StorageError
from fedemb.foundation.canonical_json import JsonFields
from fedemb.pipelines.cluster.kubernetes import ClusterObjects, ScheduledWorkflow
from fedemb.pipelines.cluster.package import (
    LONGEST_EXPERIMENT_NAME,
    LONGEST_VERSION_TEXT,
    as_utc,
    fitted,
    version_name,
)
from fedemb.pipelines.cluster.schedule import MARK, Loaded
from fedemb.pipelines.steps import PIPELINE


class OutcomeUnknown(StorageError):
    """A call gave a 5xx status or no answer: whether it was carried out is not known."""


@dataclass(frozen=True)
class VersionReference:
    """Ids of a pipeline and of one version of it."""

    pipeline_id: str
    version_id: str


TIMEOUT = 20
"""Seconds, an integer, in which Kubeflow must connect, and send the next part of its answer."""
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


@dataclass(frozen=True)
class ListedRun:
    """A run in Kubeflow's list."""

    run_id: str
    name: str
    state: str

    @property
    def alive(self) -> bool:
        """Whether it may still run; an unknown state counts as alive."""
        return self.state not in ENDED


@dataclass(frozen=True)
class StoredRun:
    """A run with all it was started with."""

    run_id: str
    name: str
    arguments: Mapping[str, object]
    pipeline_root: str | None
    """None: that of the namespace."""
    service_account: str | None
    package: Mapping[str, object]
    """Compiled pipeline: `pipeline_spec` and `platform_spec`."""

    def write_package(self, folder: Path) -> Path:
        """Writes the compiled pipeline as `fedemb compile` does, and returns its file."""
        path = folder / f"{self.run_id}.yaml"
        documents = [self.package["pipeline_spec"], self.package["platform_spec"]]
        path.write_text(yaml.safe_dump_all(documents, sort_keys=True))
        return path


@dataclass(frozen=True)
class RecurringRun:
    """A recurring run as Kubeflow has it."""

    run_id: str
    description: str
    enabled: bool
    """Whether it fires."""


class Kubeflow:
    """A namespace of a Kubeflow Pipelines API."""

    def __init__(self, host: str, namespace: str, token: str | None = None) -> None:
        """Connects; `namespace` is the profile that runs belong to, `token` the bearer's.

        Raises:
          ConfigError: the installation is single-user.
          StorageError: the API does not answer.
        """
        self.host, self.namespace = host, namespace
        with self._call(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from kfp import Client

            self._client: Any = Client(host=host, namespace=namespace, existing_token=token)
            health_api = self._client._healthz_api
            _limit(health_api.api_client.rest_client)
            health = health_api.healthz_service_get_healthz()
        if not health.multi_user:
            raise ConfigError(
                f"Kubeflow Pipelines at {host} is a single-user installation, which ignores "
                "namespaces and runs every pod in `kubeflow` with the same rights. Install it in "
                "multi-user mode."
            )

    def recurring_runs(self) -> list[RecurringRun]:
        """Returns all recurring runs of the namespace, including those of other users."""
        found = self._pages("list_recurring_runs", "recurring_runs", namespace=self.namespace)
        return [
            RecurringRun(
                run_id=run.recurring_run_id,
                description=run.description or "",
                enabled=str(run.mode).upper().endswith("ENABLE"),
            )
            for run in found
        ]

    def create_recurring_run(self, item: Loaded, start: datetime) -> str:
        """Creates a recurring run, disabled, that fires after `start`; returns its id."""
        schedule = item.schedule
        name = version_name(item.config.policy.policy_id, item.package)
        reference = self.version(item.package, name)
        experiment_id = self.experiment(schedule.experiment)
        with self._call():
            made = self._client.create_recurring_run(
                experiment_id=experiment_id,
                job_name=item.name,
                description=item.description,
                pipeline_id=reference.pipeline_id,
                version_id=reference.version_id,
                params=item.arguments,
                pipeline_root=item.config.storage.public_root,
                cron_expression=schedule.cron,
                start_time=_rfc3339(start),
                end_time=_rfc3339(schedule.end),
                no_catchup=True,
                max_concurrency=1,
                enabled=False,
                service_account=schedule.service_account,
            )
        return made.recurring_run_id

    def enable(self, run_id: str) -> None:
        """Lets a recurring run fire."""
        with self._call():
            self._client.enable_recurring_run(run_id)

    def disable(self, run_id: str) -> None:
        """Keeps a recurring run from firing."""
        with self._call():
            self._client.disable_recurring_run(run_id)

    def delete(self, run_id: str) -> None:
        """Removes a recurring run; the runs it started stay."""
        with self._call():
            self._client.delete_recurring_run(run_id)

    def runs_named(self, part: str) -> Iterator[ListedRun]:
        """All runs of the namespace whose name contains a text, archived ones among them."""
        contains = {"operation": "IS_SUBSTRING", "key": "display_name", "stringValue": part}
        found = self._pages(
            "list_runs",
            "runs",
            namespace=self.namespace,
            filter=json.dumps({"predicates": [contains]}),
        )
        for run in found:
            yield ListedRun(run.run_id, run.display_name, str(run.state or ""))

    def run(self, run_id: str) -> StoredRun:
        """Returns a run of this namespace with its arguments and its compiled pipeline.

        Raises:
          InputError: the run belongs to no version of a pipeline that fedemb uploaded.
          StorageError: Kubeflow does not know the run, or does not answer.
        """
        with self._call():
            found = self._client.get_run(run_id)
            reference, package = found.pipeline_version_reference, None
            if reference is not None:
                package = self._client.get_pipeline_version(
                    reference.pipeline_id, reference.pipeline_version_id
                ).pipeline_spec
        if not isinstance(package, dict) or {"pipeline_spec", "platform_spec"} - set(package):
            raise InputError(
                f"Run {run_id} was not started from a package of `fedemb compile`. Pass the id of "
                "a run of `fedemb submit` or of a schedule."
            )
        given = found.runtime_config
        return StoredRun(
            run_id=found.run_id,
            name=found.display_name,
            arguments=dict((given and given.parameters) or {}),
            pipeline_root=(given and given.pipeline_root) or None,
            service_account=found.service_account or None,
            package=package,
        )

    def create_run(
        self,
        reference: VersionReference,
        *,
        experiment_id: str,
        name: str,
        description: str,
        arguments: JsonFields,
        pipeline_root: str | None,
        service_account: str | None,
    ) -> str:
        """Creates a run and returns its id.

        Raises:
          OutcomeUnknown: the run may have been created.
          StorageError: Kubeflow refused it.
        """
        with self._call():
            models = self._client.api_models
            wanted = models.V2beta1Run(
                experiment_id=experiment_id,
                display_name=name,
                description=description,
                pipeline_version_reference=models.V2beta1PipelineVersionReference(
                    pipeline_id=reference.pipeline_id, pipeline_version_id=reference.version_id
                ),
                runtime_config=models.V2beta1RuntimeConfig(
                    pipeline_root=pipeline_root, parameters=dict(arguments)
                ),
                service_account=service_account,
            )
            run = self._client.runs.run_service_create_run(wanted)
        return run.run_id

    def version_names(self) -> dict[str, str]:
        """Id -> name of every version of our pipeline in this namespace."""
        pipeline_id = self._pipeline()
        return self._versions(pipeline_id) if pipeline_id is not None else {}

    def _versions(self, pipeline_id: str) -> dict[str, str]:
        return {
            version.pipeline_version_id: version.display_name
            for version in self._pages(
                "list_pipeline_versions", "pipeline_versions", pipeline_id=pipeline_id
            )
        }

    def version(self, package: Path, name: str, description: str = "") -> VersionReference:
        """Returns a version of our pipeline by its name; uploads it and its pipeline if not there.

        Raises:
          StorageError: Kubeflow does not answer or refuses.
        """
        pipeline_id = self._pipeline()
        if pipeline_id is None:
            with self._call():
                model = self._client.api_models.V2beta1Pipeline
                called = PIPELINE.name
                wanted = model(name=called, display_name=called, namespace=self.namespace)
                pipelines = self._client.pipelines
                pipeline_id = str(pipelines.pipeline_service_create_pipeline(wanted).pipeline_id)
        for version_id, found in self._versions(pipeline_id).items():
            if found == name:
                return VersionReference(pipeline_id, version_id)
        with self._call():
            made = self._client.upload_pipeline_version(
                str(package),
                name,
                pipeline_id=pipeline_id,
                description=fitted(description, LONGEST_VERSION_TEXT),
            )
        return VersionReference(pipeline_id, made.pipeline_version_id)

    def _pipeline(self) -> str | None:
        """Id of our pipeline in this namespace; one that is shared by all is not ours."""
        equal = {"operation": "EQUALS", "key": "display_name", "stringValue": PIPELINE.name}
        found = self._pages(
            "list_pipelines",
            "pipelines",
            namespace=self.namespace,
            filter=json.dumps({"predicates": [equal]}),
        )
        return next((pipeline.pipeline_id for pipeline in found), None)

    def experiment(self, name: str | None) -> str:
        """Returns the id of an experiment, created if it is not there; None: the pipeline's."""
        with self._call():
            return self._client.create_experiment(
                fitted(name or PIPELINE.name, LONGEST_EXPERIMENT_NAME), namespace=self.namespace
            ).experiment_id

    def _pages(self, call: str, items: str, **arguments: Any) -> Iterator[Any]:
        page = ""
        while True:
            with self._call():
                answer = getattr(self._client, call)(page_token=page, page_size=100, **arguments)
            yield from getattr(answer, items) or []
            page = answer.next_page_token or ""
            if not page:
                return

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Keeps the client's prints off our output and turns its errors into sentences."""
        import kfp_server_api
        import urllib3

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        except kfp_server_api.ApiException as error:
            answered = (
                f"Kubeflow API at {self.host} answered {error.status} ({_detail(error)}) for "
                f"namespace {self.namespace}"
            )
            if not error.status or error.status >= 500:
                raise OutcomeUnknown(answered) from error
            remedy = "Check the address, the token and the role of the account"
            if error.status == 409:
                remedy = "Another command made the same at this moment. Run the command again"
            raise StorageError(f"{answered}. {remedy}.") from error
        except (urllib3.exceptions.HTTPError, TimeoutError, OSError) as error:
            raise OutcomeUnknown(
                f"Kubeflow API at {self.host} does not answer ({type(error).__name__}). Check the "
                "address, or forward its port, then run the command again"
            ) from error


def _limit(rest: Any) -> None:
    """Gives each request of a client `TIMEOUT`; kfp passes none, and would wait for ever."""
    import urllib3

    plain = rest.request
    rest.pool_manager.connection_pool_kw["retries"] = urllib3.Retry(3, read=0)

    def request(*words: Any, **options: Any) -> Any:
        return plain(*words, **{**options, "_request_timeout": TIMEOUT})

    rest.request = request


def _rfc3339(moment: datetime) -> str:
    return as_utc(moment).strftime("%Y-%m-%dT%H:%M:%SZ")


def _detail(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])[:200]
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


WAITS = (0.0, 1.0)
"""Seconds before each further try of a call that may be repeated."""
LONGEST_PREFIX = 25
"""Characters of a recurring run's name that Kubeflow uses in the name of its object."""


@dataclass(frozen=True)
class Change:
    """One step towards what is wanted."""

    action: Literal["create", "replace", "disable", "delete", "keep"]
    name: str
    wanted: Loaded | None = None
    old: tuple[RecurringRun, ...] = ()
    """Recurring runs to disable or replace."""
    hidden: str = ""
    """ScheduledWorkflow to delete, which Kubeflow's list does not show."""

    def __str__(self) -> str:
        """One line of a dry run."""
        copy = " (copy)" if self.hidden else ""
        cost = f": {self.wanted.cost}" if self.wanted else ""
        return f"{self.action} {self.name}{copy}{cost}"


def plan(
    api: Kubeflow, schedules: Sequence[Loaded], now: datetime, cluster: ClusterObjects
) -> list[Change]:
    """Compares the schedules with the namespace; changes nothing.

    Raises:
      StorageError: the API does not answer or refuses.
    """
    objects = cluster.scheduled_workflows() or []  # before the list: a new one is in both
    runs = api.recurring_runs()
    ours: dict[str, list[RecurringRun]] = {}
    for run in runs:
        words = run.description.split()
        if len(words) > 1 and words[0] == MARK:
            ours.setdefault(words[1].rstrip(":"), []).append(run)
    changes = _hidden(schedules, objects, {run.run_id for run in runs})
    for item in schedules:
        name, due = item.schedule.name, item.schedule.next_run(now)
        there = tuple(ours.pop(name, ()))
        if not item.schedule.enabled or due is None:
            changes += [*_disabled(name, there), Change("keep", name)]
        elif [(run.enabled, run.description) for run in there] == [(True, item.description)]:
            changes.append(Change("keep", name))
        else:
            changes.append(Change("replace" if there else "create", name, item, there))
    for name in sorted(ours):
        changes += _disabled(name, ours[name])
    return changes


def _disabled(name: str, there: Sequence[RecurringRun]) -> list[Change]:
    return [Change("disable", name, old=(run,)) for run in there if run.enabled]


def _hidden(
    schedules: Sequence[Loaded], objects: Sequence[ScheduledWorkflow], known: set[str]
) -> list[Change]:
    """Deletes disabled objects of our recurring runs that Kubeflow created and could not list."""
    prefixes = {
        re.sub("[^a-z0-9-]+", "", item.name.lower())[:LONGEST_PREFIX]: item.schedule.name
        for item in schedules
    }
    return [
        Change("delete", prefixes[found.prefix], hidden=found.name)
        for found in objects
        if not found.enabled and found.uid not in known and found.prefix in prefixes
    ]


def apply(api: Kubeflow, changes: Sequence[Change], now: datetime, cluster: ClusterObjects) -> None:
    """Carries out a plan.

    Raises:
      StorageError: the API does not answer or refuses. At most one recurring run of each schedule
        is enabled, and none may be; the next `apply` repairs that.
    """
    for change in changes:
        if change.hidden:
            cluster.delete_scheduled_workflow(change.hidden)
        elif change.wanted is not None:
            _replace(api, change, change.wanted, now)
        else:
            for run in change.old:
                _repeated(api.disable, run.run_id)


def _replace(api: Kubeflow, change: Change, item: Loaded, now: datetime) -> None:
    """Replaces recurring runs by another, or creates the first."""
    try:
        new = api.create_recurring_run(item, max(item.schedule.start, now))
    except OutcomeUnknown as error:
        raise StorageError(
            f"{error}. Schedule {change.name} is unchanged. A disabled copy may be left, which "
            "does not fire. Run `fedemb schedule` again: it deletes the copy, also if only "
            f"`kubectl -n {api.namespace} get scheduledworkflows` shows."
        ) from error
    try:
        for run in change.old:
            if run.enabled:
                _repeated(api.disable, run.run_id)
        _repeated(api.enable, new)
    except StorageError as error:
        raise StorageError(
            f"schedule {change.name} is stopped, or its old version still fires: {error}. Run "
            "`fedemb schedule` again; it repairs the schedule."
        ) from error
    for run in change.old:
        _delete(api, run.run_id)


def _repeated(call: Callable[[str], None], run_id: str) -> None:
    """Makes a call that changes nothing when it is repeated, again if its outcome is unknown."""
    for seconds in WAITS:
        try:
            call(run_id)
            return
        except OutcomeUnknown:
            time.sleep(seconds)
    call(run_id)


def _delete(api: Kubeflow, run_id: str) -> None:
    """Deletes a disabled recurring run; one that stays is deleted by the next `apply`."""
    try:
        api.delete(run_id)
    except OutcomeUnknown:
        if any(run.run_id == run_id for run in api.recurring_runs()):
            api.delete(run_id)
