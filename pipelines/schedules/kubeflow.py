"""The few calls of a multi-user Kubeflow Pipelines API that schedules and submissions need.

Everything lies in one namespace: its pipelines, experiments and recurring runs are looked up there
and nowhere else, so that teams on one cluster do not meet.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import file_digest, json_digest
from fedemb.errors import StorageError
from fedemb.pipelines.schedules.load import Loaded
from fedemb.pipelines.schedules.package import (
    check_package,
    resumed,
    run_arguments,
)
from fedemb.pipelines.schedules.schedule import as_utc
from fedemb.pipelines.steps import PIPELINES, pipeline_of
from fedemb.privacy.mechanisms.registry import plan_mechanism


class Kubeflow:
    """A namespace of a Kubeflow Pipelines API."""

    def __init__(self, host: str, namespace: str, token: str | None = None) -> None:
        """Connects; `namespace` is the profile that runs belong to, `token` the bearer's.

        Raises:
          StorageError: the API does not answer.
        """
        self.host, self.namespace = host, namespace
        with self._call(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from kfp import Client

            self._client: Any = Client(host=host, namespace=namespace, existing_token=token)

    def recurring_runs(self) -> Iterator[Any]:
        """All recurring runs of the namespace, whoever made them."""
        return self._pages("list_recurring_runs", "recurring_runs", namespace=self.namespace)

    def create_recurring_run(self, item: Loaded, start: datetime) -> str:
        """Creates a recurring run, disabled, that fires after `start`; returns its id."""
        schedule = item.schedule
        pipeline_id, version_id = self._version(item.package, item.config)
        experiment_id = self._experiment(schedule.experiment or pipeline_of(item.config).name)
        with self._call():
            made = self._client.create_recurring_run(
                experiment_id=experiment_id,
                job_name=schedule.name,
                description=item.description,
                cron_expression=schedule.cron,
                start_time=_rfc3339(start),
                end_time=_rfc3339(schedule.end),
                no_catchup=True,
                max_concurrency=1,
                enabled=False,
                params=item.arguments,
                pipeline_id=pipeline_id,
                version_id=version_id,
                pipeline_root=schedule.pipeline_root,
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

    def submit(
        self,
        package: Path,
        config: RunConfig,
        *,
        experiment: str | None = None,
        description: str = "",
        service_account: str | None = None,
        pipeline_root: str | None = None,
        beam_options: tuple[str, ...] = (),
        resume: str | None = None,
    ) -> str:
        """Starts one run of a compiled pipeline and returns its id.

        Args:
          package: YAML of `fedemb compile`.
          config: configuration of the run.
          experiment: what the run is filed under; None: the pipeline's name.
          description: what the run promises, for who compares runs.
          service_account: account that drives the run.
          pipeline_root: public root; None: that of the namespace.
          beam_options: options of the engine that partitions the users.
          resume: id of a crashed run that this one continues: its reservation, its rounds.

        Raises:
          ConfigError: the package breaks a rule or does not run this task, or a store is not named.
          StorageError: the API does not answer or refuses.
        """
        check_package(package, config=config)
        arguments = run_arguments(config, beam_options)
        name = run_name(config, datetime.now(UTC))
        experiment_id = self._experiment(experiment or pipeline_of(config).name)
        with tempfile.TemporaryDirectory() as folder:
            if resume is not None:
                package = resumed(package, resume, Path(folder))
                name = f"{name} (resumes {resume})"
            pipeline_id, version_id = self._version(package, config)
        with self._call():
            models = self._client.api_models
            wanted = models.V2beta1Run(
                experiment_id=experiment_id,
                display_name=name,
                description=description,
                pipeline_version_reference=models.V2beta1PipelineVersionReference(
                    pipeline_id=pipeline_id, pipeline_version_id=version_id
                ),
                runtime_config=models.V2beta1RuntimeConfig(
                    pipeline_root=pipeline_root, parameters=arguments
                ),
                service_account=service_account,
            )
            run = self._client.runs.run_service_create_run(wanted)
        return run.run_id

    def version_names(self) -> dict[str, str]:
        """Id -> name of every version of our pipelines in this namespace."""
        return {
            version_id: name
            for pipeline in PIPELINES
            for version_id, name in self._versions(self._pipeline(pipeline.name)).items()
        }

    def _versions(self, pipeline_id: str | None) -> dict[str, str]:
        if pipeline_id is None:
            return {}
        return {
            version.pipeline_version_id: version.display_name
            for version in self._pages(
                "list_pipeline_versions", "pipeline_versions", pipeline_id=pipeline_id
            )
        }

    def _version(self, package: Path, config: RunConfig) -> tuple[str, str]:
        """Id of the pipeline and of this version of it, uploaded if need be."""
        pipeline, version = pipeline_of(config).name, Version.of(package, config)
        pipeline_id = self._pipeline(pipeline)
        if pipeline_id is None:
            with self._call():
                model = self._client.api_models.V2beta1Pipeline
                wanted = model(name=pipeline, display_name=pipeline, namespace=self.namespace)
                pipelines = self._client.pipelines
                pipeline_id = pipelines.pipeline_service_create_pipeline(wanted).pipeline_id
        for version_id, found in self._versions(pipeline_id).items():
            if version.is_named(found):
                return pipeline_id, version_id
        now = datetime.now(UTC)
        with self._call():
            # The client's own upload knows no tags.
            made = self._client._upload_api.upload_pipeline_version(
                str(package),
                name=version.name(now),
                pipelineid=pipeline_id,
                tags=json.dumps(version.tags(now)),
            )
        return pipeline_id, made.pipeline_version_id

    def _pipeline(self, name: str) -> str | None:
        """Id of a pipeline of ours in this namespace; one that is shared by all is not ours."""
        equal = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
        found = self._pages(
            "list_pipelines",
            "pipelines",
            namespace=self.namespace,
            filter=json.dumps({"predicates": [equal]}),
        )
        return next((pipeline.pipeline_id for pipeline in found), None)

    def _experiment(self, name: str) -> str:
        with self._call():
            return self._client.create_experiment(name, namespace=self.namespace).experiment_id

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
            raise StorageError(
                f"the Kubeflow API at {self.host} answered {error.status} ({_detail(error)}) for "
                f"namespace {self.namespace}; check the address, the token and the account's role"
            ) from error
        except (urllib3.exceptions.HTTPError, TimeoutError, OSError) as error:
            raise StorageError(
                f"the Kubeflow API at {self.host} does not answer ({type(error).__name__}); check "
                "the address, or forward its port, then run again"
            ) from error


@dataclass(frozen=True)
class Version:
    """A version of a pipeline: a compiled package as one policy runs it by one plan."""

    policy: str
    package: str
    """Digest of its content."""
    plan: str
    """Digest of the plan of privacy, as submissions and privacy plans name it."""

    @classmethod
    def of(cls, package: Path, config: RunConfig) -> Version:
        """That of a package and a configuration."""
        plan = json_digest(plan_mechanism(config).to_json())
        return cls(config.policy.policy_id, file_digest(package), plan)

    def name(self, when: datetime) -> str:
        """What a list of versions is read by: policy, week of the upload, package and plan."""
        return f"{self.policy} {_week(when)} {self._digests()}"

    def is_named(self, name: str) -> bool:
        """Whether a name is of this version, in whatever week it was uploaded."""
        policy, _, rest = name.partition(" ")
        return (policy, rest.rpartition(" ")[2]) == (self.policy, self._digests())

    def tags(self, when: datetime) -> dict[str, str]:
        """What versions are sought by; Kubeflow takes 63 characters of a value."""
        digests = {"package": self.package[:32], "plan": self.plan[:32]}
        return {"policy": self.policy[:63], "week": _week(when), **digests}

    def _digests(self) -> str:
        return f"{self.package[:16]}-{self.plan[:16]}"


def run_name(config: RunConfig, when: datetime) -> str:
    """What a list of runs is read by: policy, week and model, such as `glyphs 2027-W05 letters`."""
    return f"{config.policy.policy_id} {_week(when)} {config.release_name}"


def _week(when: datetime) -> str:
    week = when.isocalendar()
    return f"{week.year}-W{week.week:02d}"


def _rfc3339(moment: datetime) -> str:
    return as_utc(moment).strftime("%Y-%m-%dT%H:%M:%SZ")


def _detail(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])[:200]
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
