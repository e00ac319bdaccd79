"""Forecast of a block over the runs of schedules, with the arithmetic of the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import Field, ValidationError

from fedemb.config import RunConfig
from fedemb.errors import ConfigError, FedEmbError, LedgerError
from fedemb.foundation.canonical_json import JsonFields, json_object
from fedemb.foundation.section import Section
from fedemb.ledger import Charge, Ledger, PolicyTerms, blocks_of, terms_of
from fedemb.ledger.budget import spent
from fedemb.ledger.terms import charged_content, series_of
from fedemb.privacy.mechanisms.registry import plan_mechanism
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

    def to_json(self) -> JsonFields:
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
    """Returns the forecast of a block; its scheduled runs are in order of time."""

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


class PlannedRuns(Section):
    """All runs that one schedule starts, from its first to its last."""

    name: str
    """Name of the schedule."""
    config: RunConfig
    times: tuple[int, ...] = Field(default=())
    """Seconds since 1970, in order."""

    def moments(self) -> list[datetime]:
        """Returns the times in UTC."""
        return [datetime.fromtimestamp(time, UTC) for time in self.times]


def parse_planned(text: str) -> list[PlannedRuns]:
    """Returns the schedules of a JSON object by their names; empty text has none.

    Raises:
      ConfigError: not JSON, or not a valid configuration.
    """
    found: list[PlannedRuns] = []
    for name, fields in json_object((text or "{}").encode(), "the parameter schedules").items():
        try:
            given = dict(fields) if isinstance(fields, dict) else {}
            tree = given.pop("config", None)
            config = RunConfig.model_validate(tree if isinstance(tree, dict) else {})
            found.append(PlannedRuns.model_validate({"name": name, "config": config, **given}))
        except ValidationError as error:
            raise ConfigError(
                f"schedule {name} is not valid: {error.errors()[0]['msg']}. Run `fedemb schedule "
                "budget` again."
            ) from error
    return found


@dataclass(frozen=True)
class Scheduled:
    """The scheduled runs of one policy."""

    due: Sequence[Due]
    """In order of time."""
    names: Sequence[str]
    problems: Sequence[str]


def charge_of(config: RunConfig) -> tuple[Charge, PolicyTerms]:
    """One run as the ledger will charge it, and the terms it is charged under.

    Raises:
      ConfigError: the run has no price.
    """
    if not config.mechanism.private:
        raise ConfigError(
            f"mechanism.kind={config.mechanism.kind} has no privacy cost and cannot be "
            "scheduled. Set another mechanism."
        )
    plan = plan_mechanism(config)
    charge = Charge.planned(charged_content(config, plan))
    return charge, terms_of(config, series_of(config, plan))


def scheduled(schedules: Sequence[PlannedRuns], ledger: Ledger, now: datetime) -> Scheduled:
    """Returns the runs that the schedules start after `now` under the policy of a ledger."""
    due: list[Due] = []
    names: list[str] = []
    problems: list[str] = []
    for item in schedules:
        config, name = item.config, item.name
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
        due += [Due(moment, name, charge, blocks) for moment in item.moments() if moment > now]
    if schedules and not names and not problems:
        problems.append(f"no schedule charges policy {ledger.policy_id}")
    return Scheduled(sorted(due, key=lambda run: (run.time, run.schedule)), names, problems)


def _uri(ledger: Ledger) -> str:
    return ledger.chain.store.uri
