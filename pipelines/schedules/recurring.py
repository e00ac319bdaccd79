"""Makes the recurring runs of a namespace those of the reviewed schedules. Idempotent.

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

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fedemb.errors import StorageError
from fedemb.pipelines.schedules.cluster_objects import ClusterObjects, ScheduledWorkflow
from fedemb.pipelines.schedules.kubeflow import Kubeflow, OutcomeUnknown, RecurringRun
from fedemb.pipelines.schedules.schedule import MARK, Loaded

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
