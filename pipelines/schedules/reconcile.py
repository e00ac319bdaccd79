"""Compares the recurring runs of a namespace with the reviewed schedules.

A recurring run whose schedule is no longer in the folder is disabled, never deleted. Disabled
copies that a failed `apply` left are deleted, those that only Kubernetes shows among them. A
recurring run without our marker in its description belongs to others and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fedemb.pipelines.schedules.cluster_objects import ClusterObjects, ScheduledWorkflow
from fedemb.pipelines.schedules.kubeflow import Kubeflow, RecurringRun
from fedemb.pipelines.schedules.load import Loaded
from fedemb.pipelines.schedules.names import Version
from fedemb.pipelines.schedules.schedule import MARK, as_utc

LONGEST_PREFIX = 25
"""Characters of a recurring run's name that Kubeflow uses in the name of its object."""


@dataclass(frozen=True)
class Change:
    """One step towards what is wanted."""

    action: Literal["create", "replace", "disable", "delete", "keep"]
    name: str
    fields: tuple[str, ...] = ()
    """Fields that differ."""
    observed: RecurringRun | None = None
    """The recurring run that is there."""
    prepared: RecurringRun | None = None
    """One that is as wanted, but disabled: what an interrupted change left."""
    wanted: Loaded | None = None
    hidden: str | None = None
    """ScheduledWorkflow that Kubeflow's list does not show."""

    def __str__(self) -> str:
        """One line of a dry run."""
        why = f" ({', '.join(self.fields)})" if self.fields else ""
        if self.action == "delete":
            why = " (disabled copy that a failed apply left)"
        cost = f": {self.wanted.cost}" if self.wanted and self.action != "keep" else ""
        return f"{self.action} {self.name}{why}{cost}"


def plan(
    api: Kubeflow, schedules: Sequence[Loaded], now: datetime, cluster: ClusterObjects
) -> list[Change]:
    """Compares the schedules with the namespace; changes nothing.

    Raises:
      StorageError: the API does not answer or refuses.
    """
    objects = cluster.scheduled_workflows() or []  # before the list: a new one is in both
    runs = api.recurring_runs()
    ours = [run for run in runs if _schedule_of(run)]
    versions = api.version_names()
    changes: list[Change] = []
    for item in schedules:
        named = [run for run in ours if _schedule_of(run) == item.schedule.name]
        changes.append(_change(item, named, versions, now))
    stays = [change.observed for change in changes]
    surplus = [run for run in ours if run.enabled and run not in stays]
    surplus.sort(key=lambda run: run.name)
    disabled = [Change("disable", _schedule_of(run) or "", observed=run) for run in surplus]
    known = {run.run_id for run in runs}
    left = [*_left(ours, changes), *hidden(schedules, objects, known, versions)]
    return [*disabled, *left, *changes]


def _left(ours: Sequence[RecurringRun], changes: Sequence[Change]) -> list[Change]:
    """Disabled copies of recurring runs that are in use, with the same name."""
    found: list[Change] = []
    for change in changes:
        used = (change.observed, change.prepared)
        if change.wanted is not None and any(used):
            found += [
                Change("delete", change.name, observed=run)
                for run in ours
                if _schedule_of(run) == change.name
                and not run.enabled
                and run.name == change.wanted.name
                and run not in used
            ]
    return found


def hidden(
    schedules: Sequence[Loaded],
    objects: Sequence[ScheduledWorkflow],
    known: set[str],
    versions: dict[str, str],
) -> list[Change]:
    """Disabled objects of our recurring runs that Kubeflow created and could not list."""
    prefixes = {_prefix(item.name): item.schedule.name for item in schedules}
    return [
        Change("delete", prefixes[found.prefix], hidden=found.name)
        for found in objects
        if not found.enabled
        and found.uid not in known
        and found.prefix in prefixes
        and found.version_id in versions
    ]


def _prefix(name: str) -> str:
    """Returns the first part of the name of a recurring run's object."""
    return re.sub("[^a-z0-9-]+", "", name.lower())[:LONGEST_PREFIX]


def _schedule_of(run: RecurringRun) -> str | None:
    """Name of the schedule of a recurring run; None: it was not created here."""
    words = run.description.split()
    return words[1].rstrip(":") if len(words) > 1 and words[0] == MARK else None


def _change(
    item: Loaded, there: Sequence[RecurringRun], versions: dict[str, str], now: datetime
) -> Change:
    """Returns the change of one schedule, given our recurring runs of its name."""
    schedule = item.schedule
    if not schedule.enabled or schedule.next_run(now) is None:
        return Change("keep", schedule.name)
    there = sorted(there, key=lambda run: run.enabled, reverse=True)
    differing = [differences(item, run, versions, now) for run in there]
    as_wanted = [run for run, fields in zip(there, differing, strict=True) if not fields]
    if as_wanted and as_wanted[0].enabled:
        return Change("keep", schedule.name, observed=as_wanted[0], wanted=item)
    if not there:
        return Change("create", schedule.name, wanted=item)
    prepared = next((run for run in as_wanted if missed_nothing(item, run, now)), None)
    fields = (*differing[0], *(() if there[0].enabled else ("enabled",)))
    observed = None if there[0] is prepared else there[0]
    return Change("replace", schedule.name, fields, observed, prepared, item)


def differences(
    item: Loaded, run: RecurringRun, versions: dict[str, str], now: datetime
) -> tuple[str, ...]:
    """Fields in which a recurring run is not what is wanted, but for being enabled."""
    schedule, version = item.schedule, Version.of(item.package, item.config)
    wanted = {
        "name": item.name,
        "description": item.description,
        "cron": schedule.cron,
        "start": schedule.next_run(now),
        "end": as_utc(schedule.end),
        "no_catchup": True,
        "max_concurrency": 1,
        "service_account": schedule.service_account,
        "pipeline_root": schedule.pipeline_root,
        "arguments": item.arguments,
        "package": True,
    }
    found = {
        "name": run.name,
        "description": run.description,
        "cron": run.cron,
        "start": next(schedule.after(max(now, run.start or now)), None),
        "end": as_utc(run.end) if run.end else None,
        "no_catchup": run.no_catchup,
        "max_concurrency": run.max_concurrency,
        "service_account": run.service_account,
        "pipeline_root": run.pipeline_root,
        "arguments": run.arguments,
        "package": version.is_named(versions.get(run.version_id, "")),
    }
    return tuple(field for field in wanted if wanted[field] != found[field])


def missed_nothing(item: Loaded, run: RecurringRun, now: datetime) -> bool:
    """Whether no slot lies between the start of a disabled recurring run and now."""
    return run.start is not None and next(item.schedule.after(run.start), now) > now
