"""Makes the recurring runs of a Kubeflow API what the reviewed schedules say. Idempotent.

A recurring run cannot be edited, so a change deletes it and creates it anew: in that order, because
two of them at once would spend twice, and none at all spends nothing. One that is no longer in the
folder is disabled, never deleted, and so is a copy of one that is. A disabled one that is wanted
again is replaced, because merely enabling it would let it catch up on what it missed. A recurring
run without our mark is somebody else's, whatever its name, and left alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedemb.config import RunConfig
from fedemb.documents.artifacts import file_digest
from fedemb.errors import ConfigError, StorageError
from fedemb.pipelines.schedules.schedules import MARK, Loaded, as_utc, check_package, run_arguments

PIPELINE = "dp-fedemb"


@dataclass(frozen=True)
class Change:
    """One step towards what is wanted."""

    action: Literal["create", "replace", "disable", "keep"]
    name: str
    fields: tuple[str, ...] = ()
    """Fields that differ."""
    observed: str | None = None
    """Id of the recurring run that is there."""
    wanted: Loaded | None = None

    def __str__(self) -> str:
        """One line of a dry run."""
        why = f" ({', '.join(self.fields)})" if self.fields else ""
        cost = f": {self.wanted.cost}" if self.wanted and self.action != "keep" else ""
        return f"{self.action} {self.name}{why}{cost}"


class Cluster:
    """The few calls of the Kubeflow Pipelines API that schedules and submissions need."""

    def __init__(self, host: str, namespace: str | None = None, token: str | None = None) -> None:
        """Connects.

        Raises:
          StorageError: the API does not answer.
        """
        with _quietly(host), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from kfp import Client

            self._client: Any = Client(
                host=host, namespace=namespace or "kubeflow", existing_token=token
            )
        self.host, self.namespace = host, namespace

    def plan(self, schedules: Sequence[Loaded]) -> list[Change]:
        """Compares what is wanted with what is there; changes nothing."""
        wanted = {item.schedule.name: item for item in schedules}
        there: dict[str, Any] = {}
        copies: list[Any] = []
        ours = (run for run in self._recurring_runs() if (run.description or "").startswith(MARK))
        for run in sorted(ours, key=lambda run: (run.display_name, not _enabled(run))):
            if run.display_name in wanted and run.display_name not in there:
                there[run.display_name] = run
            else:
                copies.append(run)
        changes = [
            Change("disable", run.display_name, (), run.recurring_run_id)
            for run in copies
            if _enabled(run)
        ]
        for name, item in wanted.items():
            if name not in there:
                changes.append(Change("create", name, wanted=item))
                continue
            differing = self._differences(item, there[name])
            action = "replace" if differing else "keep"
            run_id = there[name].recurring_run_id
            changes.append(Change(action, name, tuple(differing), run_id, item))
        return changes

    def apply(self, changes: Sequence[Change]) -> None:
        """Carries out a plan."""
        for change in changes:
            with _quietly(self.host):
                if change.action == "disable":
                    self._client.disable_recurring_run(change.observed)
                if change.action == "replace":
                    self._client.delete_recurring_run(change.observed)
            if change.wanted is not None and change.action in ("create", "replace"):
                self._create(change.wanted)

    def submit(
        self,
        package: Path,
        config: RunConfig,
        *,
        experiment: str,
        service_account: str | None = None,
        pipeline_root: str | None = None,
        beam_options: tuple[str, ...] = (),
        resume: str | None = None,
    ) -> str:
        """Starts one run of a compiled pipeline and returns its id.

        Args:
          package: YAML of `fedemb compile`.
          config: configuration of the run.
          experiment: what the run is filed under.
          service_account: account that drives the run.
          pipeline_root: public root; None: that of the namespace.
          beam_options: options of the engine that partitions the users.
          resume: id of a crashed run that this one continues: its reservation, its rounds.

        Raises:
          ConfigError: the package breaks a rule, or a store is not named.
          StorageError: the API does not answer or refuses.
        """
        check_package(package)
        arguments = run_arguments(config, beam_options)
        name = f"{PIPELINE} {config.release.name}"
        with tempfile.TemporaryDirectory() as folder:
            if resume is not None:
                package = resumed(package, resume, Path(folder))
                name = f"{name} (resumes {resume})"
            pipeline_id, version_id = self._version(package)
        with _quietly(self.host):
            group = self._client.create_experiment(experiment, namespace=self.namespace)
            run = self._client.run_pipeline(
                experiment_id=group.experiment_id,
                job_name=name,
                params=arguments,
                pipeline_id=pipeline_id,
                version_id=version_id,
                pipeline_root=pipeline_root,
                service_account=service_account,
            )
        return run.run_id

    def _create(self, item: Loaded) -> None:
        schedule = item.schedule
        pipeline_id, version_id = self._version(item.package)
        with _quietly(self.host):
            group = self._client.create_experiment(schedule.experiment, namespace=self.namespace)
            self._client.create_recurring_run(
                experiment_id=group.experiment_id,
                job_name=schedule.name,
                description=item.description,
                cron_expression=schedule.cron,
                start_time=_rfc3339(schedule.start),
                end_time=_rfc3339(schedule.end),
                no_catchup=True,
                max_concurrency=1,
                enabled=schedule.enabled,
                params=item.arguments,
                pipeline_id=pipeline_id,
                version_id=version_id,
                pipeline_root=schedule.pipeline_root,
                service_account=schedule.service_account,
            )

    def _differences(self, item: Loaded, run: Any) -> list[str]:
        schedule = item.schedule
        cron = run.trigger.cron_schedule if run.trigger else None
        reference = run.pipeline_version_reference
        runtime = run.runtime_config
        wanted = {
            "description": item.description,
            "cron": schedule.cron,
            "start": as_utc(schedule.start),
            "end": as_utc(schedule.end),
            "no_catchup": True,
            "max_concurrency": 1,
            "enabled": schedule.enabled,
            "service_account": schedule.service_account,
            "pipeline_root": schedule.pipeline_root,
            "arguments": item.arguments,
            "package": _version_name(item.package),
        }
        found = {
            "description": run.description,
            "cron": cron.cron if cron else None,
            "start": as_utc(cron.start_time) if cron else None,
            "end": as_utc(cron.end_time) if cron else None,
            "no_catchup": bool(run.no_catchup),
            "max_concurrency": int(run.max_concurrency or 0),
            "enabled": _enabled(run),
            "service_account": run.service_account,
            "pipeline_root": (runtime.pipeline_root or None) if runtime else None,
            "arguments": runtime.parameters if runtime else None,
            "package": self._version_names().get(
                str(reference.pipeline_version_id) if reference else ""
            ),
        }
        return [field for field in wanted if wanted[field] != found[field]]

    def _recurring_runs(self) -> Iterator[Any]:
        page = ""
        while True:
            with _quietly(self.host):
                answer = self._client.list_recurring_runs(
                    page_token=page, page_size=100, namespace=self.namespace
                )
            yield from answer.recurring_runs or []
            page = answer.next_page_token or ""
            if not page:
                return

    def _version_names(self) -> dict[str, str]:
        with _quietly(self.host):
            pipeline_id = self._client.get_pipeline_id(PIPELINE)
            if pipeline_id is None:
                return {}
            names, page = {}, ""
            while True:
                answer = self._client.list_pipeline_versions(
                    pipeline_id, page_token=page, page_size=100
                )
                for version in answer.pipeline_versions or []:
                    names[version.pipeline_version_id] = version.display_name
                page = answer.next_page_token or ""
                if not page:
                    return names

    def _version(self, package: Path) -> tuple[str, str]:
        """Id of the pipeline and of the version with this content, uploaded if need be."""
        name = _version_name(package)
        with _quietly(self.host):
            pipeline_id = self._client.get_pipeline_id(PIPELINE)
            if pipeline_id is None:
                created = self._client.upload_pipeline(
                    str(package), pipeline_name=PIPELINE, namespace=self.namespace
                )
                pipeline_id = created.pipeline_id
        for version_id, found in self._version_names().items():
            if found == name:
                return pipeline_id, version_id
        with _quietly(self.host):
            version = self._client.upload_pipeline_version(
                str(package), pipeline_version_name=name, pipeline_id=pipeline_id
            )
        return pipeline_id, version.pipeline_version_id


def resumed(package: Path, run_id: str, folder: Path) -> Path:
    """Writes a copy of a package whose steps go by the id of an earlier run.

    A run goes by the id Kubeflow gives it, so a new submission is a new run. With the id of the
    crashed one in its place the steps find its reservation and its committed rounds; they refuse
    it if code, configuration or data differ.

    Raises:
      ConfigError: this is no id of a run, or the package takes the id from elsewhere.
    """
    from kfp.dsl import PIPELINE_JOB_ID_PLACEHOLDER

    if not re.fullmatch(r"[0-9A-Za-z][\w.-]{0,63}", run_id):
        raise ConfigError(f"{run_id!r} is no id of a run; take it from `fedemb ledger show`")
    text = package.read_text()
    changed = text.replace(f"'{PIPELINE_JOB_ID_PLACEHOLDER}'", f"'{run_id}'")
    if PIPELINE_JOB_ID_PLACEHOLDER in changed or changed == text:
        raise ConfigError(
            f"package {package.name} does not take the run's id from Kubeflow; compile it anew"
        )
    copy = folder / package.name
    copy.write_text(changed)
    check_package(copy)
    return copy


def _enabled(run: Any) -> bool:
    return str(run.mode).upper().endswith("ENABLE")


def _rfc3339(moment: Any) -> str:
    return as_utc(moment).strftime("%Y-%m-%dT%H:%M:%SZ")  # type: ignore[union-attr]


def _version_name(package: Path) -> str:
    return f"{PIPELINE}-{file_digest(package)[:16]}"


@contextmanager
def _quietly(host: str) -> Iterator[None]:
    """Keeps the client's prints off our output and turns its errors into sentences."""
    import kfp_server_api
    import urllib3

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except kfp_server_api.ApiException as error:
        raise StorageError(
            f"the Kubeflow API at {host} answered {error.status} ({_detail(error)}); check the "
            "address, the token and the account's role"
        ) from error
    except (urllib3.exceptions.HTTPError, TimeoutError, OSError) as error:
        raise StorageError(
            f"the Kubeflow API at {host} does not answer ({type(error).__name__}); check the "
            "address, or forward its port, then run again"
        ) from error


def _detail(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])[:200]
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
