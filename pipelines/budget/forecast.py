"""Forecast of a block over the runs of schedules, with the arithmetic of the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedemb.errors import FedEmbError, LedgerError
from fedemb.ledger import Charge, Ledger, PolicyTerms, blocks_of, terms_of
from fedemb.ledger.budget import spent
from fedemb.pipelines.schedules.cost import charge_of
from fedemb.pipelines.schedules.load import Read, read_schedules
from fedemb.storage import open_store


@dataclass(frozen=True)
class Due:
    """One run that a schedule will start."""

    time: datetime
    schedule: str
    charge: Charge
    blocks: frozenset[str]


@dataclass(frozen=True)
class Forecast:
    """Budget of one block if every scheduled run starts and uses all of its rounds."""

    runs: int
    """Scheduled runs on this block."""
    fitting: int
    """Number of these runs, in order of time, before the first one that does not fit."""
    epsilon: float
    """Cumulative epsilon after the fitting runs."""
    reached: datetime | None
    """Time of the first run that does not fit; None: all runs fit."""
    schedule: str | None
    """Schedule of the first run that does not fit."""

    @property
    def week(self) -> str | None:
        """ISO week of `reached`, such as `2027-W31`; None: all runs fit."""
        if self.reached is None:
            return None
        year, week, _ = self.reached.astimezone(UTC).isocalendar()
        return f"{year}-W{week:02d}"

    def sentence(self) -> str:
        """Returns the forecast as text."""
        if self.reached is None:
            return f"all {self.runs} scheduled runs fit (epsilon {self.epsilon:.3g} at the end)"
        if self.fitting == 0:
            return (
                f"no scheduled run fits: the run of {self.schedule} on {self.reached:%-d %B %Y} "
                "passes the cap"
            )
        year, week, _ = self.reached.astimezone(UTC).isocalendar()
        return (
            f"cap reached in week {week} of {year}: {self.fitting} of {self.runs} scheduled runs "
            f"fit, and the run of {self.schedule} on {self.reached:%-d %B %Y} does not"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON, times in ISO 8601."""
        return {
            "runs": self.runs,
            "fitting": self.fitting,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "reached": self.reached and self.reached.isoformat(),
            "week": self.week,
            "schedule": self.schedule,
        }


def forecast(terms: PolicyTerms, charges: Sequence[Charge], due: Sequence[Due]) -> Forecast:
    """Returns the forecast of a block.

    Args:
      terms: terms of the policy.
      charges: charges of the block so far.
      due: scheduled runs on the block, in order of time.
    """

    def after(runs: int) -> float:
        try:
            return spent(terms, [*charges, *(run.charge for run in due[:runs])]).epsilon
        except LedgerError:  # more runs than a planned series holds, or no delta left
            return math.inf

    low, high = 0, len(due) + 1  # cumulative epsilon never decreases, so the first miss is found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if after(middle) <= terms.epsilon_cap else (low, middle)
    missed = due[low] if low < len(due) else None
    return Forecast(
        runs=len(due),
        fitting=low,
        epsilon=after(low),
        reached=missed and missed.time,
        schedule=missed and missed.schedule,
    )


@dataclass(frozen=True)
class Scheduled:
    """The scheduled runs of one policy."""

    due: Sequence[Due]
    """In order of time."""
    names: Sequence[str]
    problems: Sequence[str]


def read_scheduled(folder: Path) -> list[Read]:
    """Returns the enabled schedules of a folder; compiled packages are not needed.

    Raises:
      ConfigError: a file is not a valid schedule, or the folder has no file.
    """
    return [item for item in read_schedules(folder) if item.schedule.enabled]


def scheduled(schedules: Sequence[Read], ledger: Ledger, now: datetime) -> Scheduled:
    """Returns the runs that the schedules start after `now` under the policy of a ledger."""
    due: list[Due] = []
    names: list[str] = []
    problems: list[str] = []
    for item in schedules:
        config, name = item.config, item.schedule.name
        if config.policy.policy_id != ledger.policy_id or config.purpose != "release":
            continue
        if config.storage.ledger and open_store(config.storage.ledger).uri != _uri(ledger):
            problems.append(f"{name} charges policy {ledger.policy_id} in {config.storage.ledger}")
            continue
        try:
            ledger.check_terms(terms_of(config, ledger.terms.series))
            charge, _ = charge_of(config)
        except FedEmbError as error:
            problems.append(f"{name} will be refused: {error}")
            continue
        names.append(name)
        blocks = frozenset(blocks_of(config.partition))
        moments = item.schedule.after(max(now, item.schedule.start))
        due += [Due(moment, name, charge, blocks) for moment in moments]
    if schedules and not names and not problems:
        problems.append(f"no schedule charges policy {ledger.policy_id}")
    return Scheduled(sorted(due, key=lambda run: (run.time, run.schedule)), names, problems)


def _uri(ledger: Ledger) -> str:
    return ledger.chain.store.uri
