"""Recurring runs of the pipelines that train nothing: `retention` and `budget`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import Json, JsonFields, json_digest
from fedemb.foundation.digests import file_digest
from fedemb.pipelines.compile.fields import text_at
from fedemb.pipelines.compile.rules import SECRET_VALUES, read_compiled
from fedemb.pipelines.graph import Pipeline
from fedemb.pipelines.run.expired import check_stores_apart
from fedemb.pipelines.schedules.cron import Cron
from fedemb.pipelines.schedules.kubeflow import Kubeflow
from fedemb.pipelines.schedules.load import planned_text
from fedemb.pipelines.schedules.names import Version
from fedemb.pipelines.schedules.package import check_package
from fedemb.steps.delete_expired.retention import Retention
from fedemb.steps.watch_budget.forecast import PlannedRuns

NAME = "fedemb-{}"
"""Name of the recurring run of a pipeline; a namespace has one."""
MARK = "fedemb/{}/1"
"""First word of its description."""


@dataclass(frozen=True)
class Applied:
    """Result of an application."""

    run_id: str
    created: bool
    """Whether a recurring run was created; otherwise an equal one exists."""
    deleted: tuple[str, ...]
    """Ids of replaced recurring runs."""


def retention_arguments(
    config: RunConfig, retention: Retention, *, dry_run: bool
) -> dict[str, Json]:
    """Returns the arguments of the pipeline `retention`.

    Raises:
      ConfigError: a store is missing, or two stores overlap.
    """
    storage = config.storage
    if not storage.private_root or not storage.ledger:
        raise ConfigError(
            "storage.private_root and storage.ledger must be set for a schedule of retention. "
            "Pass the configuration of your runs with --config."
        )
    check_stores_apart(storage)
    return {
        "private_root": storage.private_root,
        "public_root": storage.public_root or "",
        "ledger": storage.ledger,
        "retention": retention.model_dump_json(),
        "dry_run": dry_run,
    }


def budget_arguments(
    ledger: str, schedules: Sequence[PlannedRuns], alert_below: float
) -> dict[str, Json]:
    """Returns the arguments of the pipeline `budget`.

    Raises:
      ConfigError: a configuration contains a secret, which the API keeps.
    """
    text = planned_text(schedules)
    if SECRET_VALUES.search(text):
        raise ConfigError(
            "A schedule holds a key or a password, and Kubeflow keeps and shows arguments. Name a "
            "secret of the cluster in the profile's `secrets`."
        )
    return {"ledger": ledger, "schedules": text, "alert_below": alert_below}


def apply_maintenance(
    api: Kubeflow,
    pipeline: Pipeline,
    package: Path,
    *,
    cron: str,
    arguments: JsonFields,
    service_account: str,
) -> Applied:
    """Creates the recurring run of a pipeline, or replaces one that differs. Idempotent.

    Raises:
      ConfigError: the cron expression or the package is not valid.
      StorageError: Kubeflow does not answer or refuses.
    """
    Cron.parse(cron)
    check_package(package)
    found = text_at(read_compiled(package)[0], "pipelineInfo", "name")
    if found != pipeline.name:
        raise ConfigError(
            f"Package {package.name} is the pipeline {found}. Run `fedemb compile --pipeline "
            f"{pipeline.name}`."
        )
    version = Version(pipeline.name, file_digest(package), json_digest(dict(arguments)))
    digest = json_digest([version.package, version.plan, cron, service_account])[:16]
    mark, name = MARK.format(pipeline.name), NAME.format(pipeline.name)
    marker = f"{mark} {digest}: "
    ours = [
        run
        for run in api.recurring_runs()
        if run.name == name and run.description.startswith(f"{mark} ")
    ]
    equal = [run for run in ours if run.description.startswith(marker) and run.enabled]
    if equal:
        run_id = equal[0].run_id
    else:
        run_id = api.create_maintenance_run(
            api.version(package, pipeline.name, version),
            pipeline,
            name=name,
            description=f"{marker}{pipeline.description}",
            cron=cron,
            arguments=arguments,
            service_account=service_account,
        )
    old = tuple(run.run_id for run in ours if run.run_id != run_id)
    for each in old:
        api.delete(each)
    return Applied(run_id, not equal, old)
