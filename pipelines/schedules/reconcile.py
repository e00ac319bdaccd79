"""Makes the recurring runs of a namespace what the reviewed schedules say. Idempotent.

A recurring run cannot be edited. A changed one is created beside the old one, disabled; the old one
is disabled, the new one enabled, the old one deleted. So two never fire at once, which would spend
twice; and if a call fails, the one that fired before fires again. What is left of such a failure is
disabled, and the next `apply` takes it up.

A recurring run starts when it is created, not when its schedule does: Kubeflow starts the latest
slot that lies behind it at once, also without catch-up, and that would be a run nobody planned. For
the same reason a disabled one is enabled only if it missed nothing.

One that is no longer in the folder is disabled, never deleted, and so is a copy of one that is. A
recurring run without our mark is somebody else's, whatever its name, and left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from fedemb.errors import StorageError
from fedemb.pipelines.schedules.kubeflow import Kubeflow, Version
from fedemb.pipelines.schedules.load import Loaded
from fedemb.pipelines.schedules.schedule import MARK, as_utc


@dataclass(frozen=True)
class Change:
    """One step towards what is wanted."""

    action: Literal["create", "replace", "disable", "keep"]
    name: str
    fields: tuple[str, ...] = ()
    """Fields that differ."""
    observed: Any = None
    """The recurring run that is there."""
    prepared: Any = None
    """One that is as wanted, but disabled: what an interrupted change left."""
    wanted: Loaded | None = None

    def __str__(self) -> str:
        """One line of a dry run."""
        why = f" ({', '.join(self.fields)})" if self.fields else ""
        cost = f": {self.wanted.cost}" if self.wanted and self.action != "keep" else ""
        return f"{self.action} {self.name}{why}{cost}"


def plan(api: Kubeflow, schedules: Sequence[Loaded], now: datetime) -> list[Change]:
    """Compares what is wanted with what is there; changes nothing.

    Raises:
      StorageError: the API does not answer or refuses.
    """
    ours = [run for run in api.recurring_runs() if (run.description or "").startswith(MARK)]
    versions = api.version_names()
    changes: list[Change] = []
    for item in schedules:
        named = [run for run in ours if run.display_name == item.schedule.name]
        changes.append(_change(item, named, versions, now))
    stays = [change.observed for change in changes]
    surplus = [run for run in ours if _enabled(run) and run not in stays]
    surplus.sort(key=lambda run: run.display_name)
    return [Change("disable", run.display_name, observed=run) for run in surplus] + changes


def apply(api: Kubeflow, changes: Sequence[Change], now: datetime) -> None:
    """Carries out a plan.

    Raises:
      StorageError: the API does not answer or refuses; what fired before fires still.
    """
    for change in changes:
        if change.action == "disable":
            api.disable(change.observed.recurring_run_id)
        elif change.wanted is not None and change.action in ("create", "replace"):
            _replace(api, change, change.wanted, now)


def _change(item: Loaded, there: Sequence[Any], versions: dict[str, str], now: datetime) -> Change:
    """What to do about one schedule, given the recurring runs of its name that are ours."""
    schedule = item.schedule
    if not schedule.enabled or schedule.next_run(now) is None:
        return Change("keep", schedule.name)
    there = sorted(there, key=_enabled, reverse=True)
    differing = [_differences(item, run, versions, now) for run in there]
    as_wanted = [run for run, fields in zip(there, differing, strict=True) if not fields]
    if as_wanted and _enabled(as_wanted[0]):
        return Change("keep", schedule.name, observed=as_wanted[0])
    if not there:
        return Change("create", schedule.name, wanted=item)
    prepared = next((run for run in as_wanted if _missed_nothing(item, run, now)), None)
    fields = (*differing[0], *(() if _enabled(there[0]) else ("enabled",)))
    observed = None if there[0] is prepared else there[0]
    return Change("replace", schedule.name, fields, observed, prepared, item)


def _replace(api: Kubeflow, change: Change, item: Loaded, now: datetime) -> None:
    """Puts a recurring run in the place of another, or of none."""
    if change.prepared is not None:
        new = change.prepared.recurring_run_id
    else:
        new = api.create_recurring_run(item, max(item.schedule.start, now))
    if change.observed is None:
        api.enable(new)
        return
    old = change.observed.recurring_run_id
    if _enabled(change.observed):
        try:
            api.disable(old)
            api.enable(new)
        except BaseException:
            _put_back(api, change.name, old, new)
            raise
    else:
        api.enable(new)
    api.delete(old)


def _put_back(api: Kubeflow, name: str, old: str, new: str) -> None:
    """Lets the old one fire again: a call that failed may have been carried out all the same."""
    try:
        api.disable(new)
        api.enable(old)
    except StorageError as error:
        raise StorageError(
            f"schedule {name} was being replaced and could not be put back, so it may be stopped; "
            f"run `fedemb schedule apply` again ({error})"
        ) from error


def _differences(
    item: Loaded, run: Any, versions: dict[str, str], now: datetime
) -> tuple[str, ...]:
    """Fields in which a recurring run is not what is wanted, but for being enabled."""
    schedule = item.schedule
    cron = run.trigger.cron_schedule if run.trigger else None
    reference = run.pipeline_version_reference
    runtime = run.runtime_config
    version = Version.of(item.package, item.config)
    name = versions.get(str(reference.pipeline_version_id) if reference else "", "")
    wanted = {
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
        "description": run.description,
        "cron": cron.cron if cron else None,
        "start": next(schedule.after(max(now, cron.start_time or now)), None) if cron else None,
        "end": as_utc(cron.end_time) if cron and cron.end_time else None,
        "no_catchup": bool(run.no_catchup),
        "max_concurrency": int(run.max_concurrency or 0),
        "service_account": run.service_account,
        "pipeline_root": (runtime.pipeline_root or None) if runtime else None,
        "arguments": runtime.parameters if runtime else None,
        "package": version.is_named(name),
    }
    return tuple(field for field in wanted if wanted[field] != found[field])


def _missed_nothing(item: Loaded, run: Any, now: datetime) -> bool:
    """Whether no slot lies between the start of a disabled recurring run and now."""
    start = run.trigger.cron_schedule.start_time
    return start is not None and next(item.schedule.after(start), now) > now


def _enabled(run: Any) -> bool:
    return str(run.mode).upper().endswith("ENABLE")
