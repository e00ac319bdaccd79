"""The recurring run of the pipeline `retention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.digests import file_digest
from fedemb.pipelines.compile.rules import read_compiled
from fedemb.pipelines.retention import RETENTION
from fedemb.pipelines.schedules.cron import Cron
from fedemb.pipelines.schedules.kubeflow import Kubeflow
from fedemb.pipelines.schedules.names import Version
from fedemb.pipelines.schedules.package import check_package
from fedemb.pipelines.schedules.reconcile import enabled
from fedemb.steps.delete_expired.retention import Retention, check_apart

NAME = "fedemb-retention"
"""Name of the recurring run; a namespace has one."""
MARK = "fedemb/retention/1"
"""First word of its description."""


@dataclass(frozen=True)
class Applied:
    """Result of an application."""

    run_id: str
    created: bool
    """Whether a recurring run was created; otherwise an equal one exists."""
    deleted: tuple[str, ...]
    """Ids of replaced recurring runs."""


def arguments_of(config: RunConfig, retention: Retention, *, dry_run: bool) -> dict[str, Any]:
    """Returns the arguments of the pipeline.

    Raises:
      ConfigError: a store is missing, or two stores overlap.
    """
    storage = config.storage
    if not storage.private_root or not storage.ledger:
        raise ConfigError(
            "storage.private_root and storage.ledger must be set for a schedule of retention. "
            "Pass the configuration of your runs with --config."
        )
    kept = (storage.ledger, storage.keys, storage.releases, storage.rollback_anchor)
    roots = filter(None, (storage.private_root, storage.public_root))
    check_apart(roots, filter(None, kept))
    return {
        "private_root": storage.private_root,
        "public_root": storage.public_root or "",
        "ledger": storage.ledger,
        "retention": retention.model_dump_json(),
        "dry_run": dry_run,
    }


def apply_retention(
    api: Kubeflow, package: Path, cron: str, arguments: Mapping[str, Any], service_account: str
) -> Applied:
    """Creates the recurring run, or replaces one that differs. Idempotent.

    Raises:
      ConfigError: the cron expression or the package is not valid.
      StorageError: Kubeflow does not answer or refuses.
    """
    Cron.parse(cron)
    check_package(package)
    found = read_compiled(package)[0]["pipelineInfo"]["name"]
    if found != RETENTION.name:
        raise ConfigError(
            f"Package {package.name} is the pipeline {found}. Run `fedemb compile --pipeline "
            f"{RETENTION.name}`."
        )
    version = Version(RETENTION.name, file_digest(package), json_digest(dict(arguments)))
    digest = json_digest([version.package, version.plan, cron, service_account])[:16]
    marker = f"{MARK} {digest}: "
    ours = [
        run
        for run in api.recurring_runs()
        if run.display_name == NAME and str(run.description or "").startswith(f"{MARK} ")
    ]
    equal = [run for run in ours if run.description.startswith(marker) and enabled(run)]
    if equal:
        run_id = equal[0].recurring_run_id
    else:
        run_id = api.create_maintenance_run(
            api.version(package, RETENTION.name, version),
            experiment_id=api.experiment(RETENTION.name),
            name=NAME,
            description=f"{marker}{RETENTION.description}",
            cron=cron,
            arguments=arguments,
            service_account=service_account,
        )
    old = tuple(run.recurring_run_id for run in ours if run.recurring_run_id != run_id)
    for each in old:
        api.delete(each)
    return Applied(run_id, not equal, old)
