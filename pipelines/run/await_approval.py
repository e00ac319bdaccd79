"""Waits for the approvals of a run, up to their deadline, then decides again.

The waiting process reads the ledger and nothing else: it opens no key store and no private data. At
the deadline the gate runs again and refuses the release; nothing is released without approvals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from fedemb.errors import ConfigError, InputError, StorageError
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import missing
from fedemb.pipelines.run.signed import signed_report

SECONDS = 15.0
"""Seconds between two reads of the ledger."""


def require_deadline(hours: float | None) -> None:
    """Refuses to wait without end.

    Raises:
      ConfigError: `release.approval_hours` is not set.
    """
    if hours is None:
        raise ConfigError(
            "--await-approval waits until a deadline, and release.approval_hours is not set. Set "
            "it, for example with --set release.approval_hours=48."
        )


def await_approval(
    run: RunDirectory,
    say: Callable[[str], None],
    *,
    every: float = SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> bool:
    """Waits until the approvals of a run are in the ledger, or their deadline has passed.

    Args:
      run: run that the gate left waiting for approval.
      say: prints one line.
      every: seconds between two reads of the ledger.
      sleep: waits a number of seconds.
      now: returns the current time in UTC.

    Returns: Whether all approvals were recorded in time. The gate decides again in both cases.

    Raises:
      InputError: the run has no privacy report.
      ConfigError: its report has no deadline.
      LedgerError: the ledger is broken.
    """
    report = signed_report(run)
    if report is None:
        raise InputError(f"Run {run.run_id} has no privacy report. Resume it first.")
    deadline = report.body.approve_by
    if deadline is None:
        require_deadline(None)
        return False
    said = None
    while True:
        try:
            left = missing(run, report)
            line = f"Waiting for approval: {max(left, 0)} missing, until {deadline:%Y-%m-%d %H:%M}"
            line += f" UTC. Approve with `fedemb approve {run.root}`."
        except StorageError as error:  # the deadline limits the retries
            left, line = 1, f"Waiting for approval: the ledger cannot be read now: {error}"
        if left <= 0:
            return True
        if now() > deadline:
            return False
        if line != said:
            say(line)
            said = line
        sleep(min(every, max(1.0, (deadline - now()).total_seconds())))
