"""Carries out the changes of a plan. Idempotent.

A recurring run cannot be edited. A changed one is created beside the old one, disabled; the old one
is disabled, the new one enabled, the old one deleted. Two are never enabled at once, which would
spend twice. Calls that can be repeated are repeated. If the connection stays lost between the two
calls, neither may be enabled; the next `apply` repairs that.

A recurring run starts when it is created, not when its schedule does: Kubeflow starts the latest
slot after the start at once, also without catch-up, and that would be a run that is not planned.
For the same reason a disabled one is enabled only if it missed nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from fedemb.errors import StorageError
from fedemb.pipelines.schedules.cluster_objects import ClusterObjects
from fedemb.pipelines.schedules.kubeflow import Kubeflow, OutcomeUnknown
from fedemb.pipelines.schedules.load import Loaded
from fedemb.pipelines.schedules.reconcile import (
    Change,
    differences,
    hidden,
    missed_nothing,
)

WAITS = (0.0, 1.0)
"""Seconds before each further try of a call that may be repeated."""


def apply(api: Kubeflow, changes: Sequence[Change], now: datetime, cluster: ClusterObjects) -> None:
    """Carries out a plan.

    Raises:
      StorageError: the API does not answer or refuses. At most one recurring run of each schedule
        is enabled, and none may be; the next `apply` repairs that.
    """
    for change in changes:
        if change.hidden is not None:
            cluster.delete_scheduled_workflow(change.hidden)
        elif change.wanted is not None and change.action in ("create", "replace"):
            _replace(api, change, change.wanted, now, cluster)
        elif change.observed is not None and change.action == "disable":
            _repeated(api.disable, change.observed.run_id)
        elif change.observed is not None and change.action == "delete":
            _delete(api, change.observed.run_id)


def _replace(
    api: Kubeflow, change: Change, item: Loaded, now: datetime, cluster: ClusterObjects
) -> None:
    """Replaces a recurring run by another, or creates the first."""
    if change.prepared is not None:
        new = change.prepared.run_id
    else:
        new = _create(api, change, item, now, cluster)
    if change.observed is None:
        _repeated(api.enable, new)
        return
    old = change.observed.run_id
    if change.observed.enabled:
        try:
            _repeated(api.disable, old)
            _repeated(api.enable, new)
        except BaseException:
            _put_back(api, change.name, old, new)
            raise
    else:
        _repeated(api.enable, new)
    _delete(api, old)


def _create(
    api: Kubeflow, change: Change, item: Loaded, now: datetime, cluster: ClusterObjects
) -> str:
    """Creates a disabled recurring run, or finds the one that a call without answer created."""
    try:
        return api.create_recurring_run(item, max(item.schedule.start, now))
    except OutcomeUnknown as error:
        runs = api.recurring_runs()
        versions = api.version_names()
        for run in runs:
            if (
                run != change.observed
                and not run.enabled
                and not differences(item, run, versions, now)
                and missed_nothing(item, run, now)
            ):
                return run.run_id
        objects = cluster.scheduled_workflows()
        known = {run.run_id for run in runs}
        copies = hidden([item], objects or [], known, versions)
        gone = [cluster.delete_scheduled_workflow(copy.hidden) for copy in copies if copy.hidden]
        after = ""
        if objects is None or not all(gone):
            after = (
                "A disabled ScheduledWorkflow that Kubeflow's list does not show may be left; it "
                f"does not fire. Look with `kubectl -n {api.namespace} get scheduledworkflows`. "
            )
        raise StorageError(
            f"{error}. Schedule {change.name} is unchanged. {after}Run `fedemb schedule apply` "
            "again."
        ) from error


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


def _put_back(api: Kubeflow, name: str, old: str, new: str) -> None:
    """Enables the old recurring run again: a call that failed may have been carried out."""
    try:
        _repeated(api.disable, new)
        _repeated(api.enable, old)
    except StorageError as error:
        raise StorageError(
            f"schedule {name} is stopped, or its old version still fires: the connection was lost "
            "while it was replaced. Run `fedemb schedule apply` again; it repairs the schedule "
            f"({error})"
        ) from error
