"""A schedule: a recurring run as reviewed data, checked and priced before it is applied.

The price is computed as the ledger will charge the runs. The ledger refuses a run that passes the
cap together with runs of other schedules.

Cron expressions as Kubeflow's scheduler (robfig/cron) reads them: six fields, seconds first.

Only what no version of that parser reads in another way is accepted: numbers, rising ranges, lists,
steps, and one of the two day fields. Times are computed here and not by a cron library, because
libraries differ in the days 29 to 31.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Literal, Self

from pydantic import AwareDatetime, Field, PositiveFloat, ValidationError, model_validator

from fedemb.config import Name, RunConfig, Section
from fedemb.errors import BudgetExceeded, ConfigError, LedgerError
from fedemb.foundation.canonical_json import Json, json_digest
from fedemb.foundation.files import read_regular
from fedemb.foundation.section import NotYaml, parse_yaml
from fedemb.ledger import charged_content, series_of, terms_of
from fedemb.ledger.budget import Charge, spent
from fedemb.pipelines.cluster.package import as_utc, check_package, fitted, run_arguments
from fedemb.pipelines.run.load_config import load_config, updated
from fedemb.privacy.registry import plan_mechanism

_PART = re.compile(r"(?:\*|(\d{1,2})-(\d{1,2}))(?:/([1-9]\d?))?|(\d{1,2})", re.ASCII)
_FIELDS = {
    "second": (0, 59),
    "minute": (0, 59),
    "hour": (0, 23),
    "day of month": (1, 31),
    "month": (1, 12),
    "day of week": (0, 6),
}
"""Field -> its smallest and largest value; Sunday is 0."""


@dataclass(frozen=True)
class Cron:
    """Values of the six fields."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Cron:
        """Reads an expression.

        Raises:
          ConfigError: not six fields, a field that is not valid, or both day fields are restricted.
        """
        fields = text.split(" ")
        if len(fields) != len(_FIELDS):
            raise ConfigError(
                f"cron={text!r} has {len(text.split())} fields, expected six with the seconds "
                "first, separated by one space each. Use '0 0 3 * * 1' for Mondays at three."
            )
        if "*" not in (fields[3], fields[5]):
            raise ConfigError(f"cron={text!r} restricts both day fields. Set one of them to *.")
        return cls(*(_values(text, *pair) for pair in zip(_FIELDS, fields, strict=True)))

    def after(self, moment: datetime, end: datetime) -> Iterator[datetime]:
        """Yields the times after a moment and not after the end, both in UTC."""
        day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        while day <= end:
            of_week = (day.weekday() + 1) % 7 in self.weekdays
            if day.month in self.months and day.day in self.days and of_week:
                for hour, minute, second in product(self.hours, self.minutes, self.seconds):
                    time = day.replace(hour=hour, minute=minute, second=second)
                    if moment < time <= end:
                        yield time
            day += timedelta(days=1)


def _values(text: str, name: str, written: str) -> tuple[int, ...]:
    """Returns the values of a field in rising order."""
    low, high = _FIELDS[name]
    found: set[int] = set()
    for part in written.split(","):
        match = _PART.fullmatch(part)
        first, last, step, alone = match.groups() if match else (None, None, None, "-1")
        begin, end = int(alone or first or low), int(alone or last or high)
        if not low <= begin <= end <= high or (part[:1] == "*" and part != written):
            raise ConfigError(
                f"cron={text!r} has a {name} that is not valid. Use *, */n, a, a-b, a-b/n or a "
                f"list of numbers from {low} to {high}."
            )
        found.update(range(begin, end + 1, int(step or 1)))
    return tuple(sorted(found))


MARK = "fedemb/schedule/1"
"""First word of the description of every recurring run that is ours to change."""
MOST_RUNS = 10_000
FIRST_YEAR, LAST_YEAR = 1970, 2099
"""Years of a schedule. From 2096 to 2104 no year has a 29 February, which is longer than the five
years that Kubeflow's scheduler looks ahead."""


class Package(Section):
    """The compiled pipeline, pinned."""

    path: str
    """YAML of `fedemb compile`, relative to the schedule's file."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of that file; the uploaded version bears its first digits as its name."""


class ScheduleBudget(Section):
    """Largest cost of the whole schedule, from its first to its last run."""

    epsilon: PositiveFloat
    """Cap on the cumulative epsilon of a user in every run, at the policy's delta."""


class Schedule(Section):
    """A recurring run."""

    schema_: Literal["fedemb/schedule/1"] = Field(alias="schema")
    name: Name
    """Name of the schedule and of its file; the recurring run is named policy-model-schedule."""
    description: str = ""
    experiment: str | None = None
    """Experiment the runs are filed under; null: the pipeline's name."""
    package: Package
    config: str
    """Configuration: a preset's name, or a YAML file relative to the schedule's file."""
    overrides: dict[str, object] = Field(default={})
    """Dotted keys of the configuration -> values."""
    cron: str
    """Six fields, seconds first, UTC."""
    start: AwareDatetime
    """No run before. Fixed, so that the number of runs is."""
    end: AwareDatetime
    """No run after. A schedule without end has no price."""
    enabled: bool = True
    service_account: str = "fedemb-run"
    beam_options: tuple[str, ...] = ()
    """Options of the Beam engine that partitions the users, e.g. --runner=DataflowRunner."""
    mlflow: str | None = None
    """Tracking server of MLflow that receives each ended run, http(s)://; null: none."""
    budget: ScheduleBudget

    @model_validator(mode="after")
    def _check(self) -> Self:
        Cron.parse(self.cron)
        if self.start.year < FIRST_YEAR or self.end.year > LAST_YEAR:
            raise ValueError(
                f"start={self.start} and end={self.end} are not from {FIRST_YEAR} to {LAST_YEAR}. "
                "Set nearer dates."
            )
        if self.end <= self.start:
            raise ValueError(f"end={self.end} is not after start={self.start}. Set a later end.")
        if len(self.slots) > MOST_RUNS:
            raise ValueError(
                f"cron={self.cron!r} fires more than {MOST_RUNS} times; run less often"
            )
        return self

    @cached_property
    def slots(self) -> tuple[datetime, ...]:
        """Every moment it fires, in UTC: after the start, until the end and with it."""
        return tuple(islice(self.after(self.start), MOST_RUNS + 1))

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Moments it fires after another one and not after its end; its start is ignored."""
        yield from Cron.parse(self.cron).after(as_utc(moment), as_utc(self.end))

    def next_run(self, moment: datetime) -> datetime | None:
        """The first run after a moment; None: it is over."""
        return next(self.after(max(moment, self.start)), None)


@dataclass(frozen=True)
class Loaded:
    """A schedule with everything it names, checked."""

    schedule: Schedule
    config: RunConfig
    package: Path
    cost: str
    """Privacy cost of all runs, as a sentence."""

    @property
    def arguments(self) -> dict[str, Json]:
        """Arguments of the pipeline."""
        return run_arguments(self.config, self.schedule.beam_options, self.schedule.mlflow)

    @property
    def name(self) -> str:
        """Name of the recurring run: policy, model and schedule.

        Kubeflow names its runs by the first 25 characters, an index and a hash.
        """
        config = self.config
        return fitted(f"{config.policy.policy_id}-{config.release_name}-{self.schedule.name}")

    @property
    def description(self) -> str:
        """Description of the recurring run: marker, name of the schedule, digest, cost.

        The marker and the name identify a recurring run that was created here. It cannot be edited,
        so the digest of all that it was created from says whether it is as wanted.
        """
        digest = json_digest([self.schedule.model_dump(mode="json"), self.arguments, self.name])
        text = f"{MARK} {self.schedule.name} {digest[:16]}: {self.cost}"
        return fitted(f"{text}. {self.schedule.description}".rstrip(" ."))


def load_schedules(folder: Path) -> list[Loaded]:
    """Reads and prices all schedules of a folder, in order of names.

    Raises:
      ConfigError: a file is wrong, or the package it pins is another one.
      BudgetExceeded: a schedule costs more than its budget or its policy's cap.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(
            f"no schedule (*.yaml) in {folder}; name the folder that holds them, and to stop the "
            "last one keep its file with `enabled: false`"
        )
    return [load_schedule(file) for file in files]


def is_schedule(file: Path) -> bool:
    """Returns whether a file says that it is a schedule."""
    return file.is_file() and b"fedemb/schedule/1" in read_regular(file)


def load_schedule(file: Path) -> Loaded:
    """Reads and prices one schedule; see `load_schedules`."""
    try:
        text = read_regular(file).decode()
        if re.search("^deploymentSpec:", text, re.MULTILINE):
            raise ConfigError(
                f"{file.name} is a compiled pipeline, and its folder is for schedules; move it to "
                f"{file.parent.name}/packages/ and say so in package.path"
            )
        schedule = Schedule.model_validate(parse_yaml(text))
    except (ValidationError, NotYaml, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"schedule {file.name} is wrong: {_first_line(error)}. See "
            "infra/schedules/example/weekly.yaml"
        ) from error
    if schedule.name != file.stem:
        raise ConfigError(
            f"schedule {file.name} names itself {schedule.name}; file and name must be the same"
        )
    preset = "/" not in schedule.config and not schedule.config.endswith(".yaml")
    source = schedule.config if preset else file.parent / schedule.config
    config = updated(load_config(source), schedule.overrides)
    package = file.parent / schedule.package.path
    check_package(package, schedule.package.sha256, config)
    found = Loaded(schedule, config, package, cost_of(schedule, config))
    _ = found.arguments  # refuses arguments that a cluster cannot use
    return found


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    return str(error).splitlines()[0]


def cost_of(schedule: Schedule, config: RunConfig) -> str:
    """Prices all runs of a schedule as the ledger will, for a user who is in every run.

    Raises:
      ConfigError: the schedule never fires, or its runs have no price.
      BudgetExceeded: they cost more than the schedule's budget or the policy's cap, or are more
        than a planned policy commits.
      UnsupportedAccounting: no accountant is valid for the mechanism.
    """
    if not config.mechanism.private:
        raise ConfigError(
            f"mechanism.kind={config.mechanism.kind} has no privacy cost and cannot be "
            "scheduled. Set another mechanism."
        )
    plan, runs = plan_mechanism(config), len(schedule.slots)
    if not runs:
        raise ConfigError(
            f"schedule {schedule.name} never fires from {schedule.start:%Y-%m-%d} to "
            f"{schedule.end:%Y-%m-%d}. Correct cron={schedule.cron!r} or the dates."
        )
    charge = Charge.planned(charged_content(config, plan))
    terms = terms_of(config, series_of(config, plan))
    try:
        whole, one = spent(terms, [charge] * runs), spent(terms, [charge])
    except LedgerError as error:
        raise BudgetExceeded(
            f"schedule {schedule.name} has {runs} runs, more than the policy holds ({error}). Set "
            "an earlier end."
        ) from error
    for cap, whose in ((schedule.budget.epsilon, "its budget"), (terms.epsilon_cap, "the policy")):
        if not whole.epsilon <= cap:
            raise BudgetExceeded(
                f"schedule {schedule.name} costs epsilon={whole.epsilon:.3f} in {runs} runs, and "
                f"{whose} allows {cap:.3f}: end earlier, run less often, or raise noise_multiplier"
            )
    return (
        f"{runs} runs, at most epsilon={whole.epsilon:.3f} at delta={whole.delta:g} for one user "
        f"in all of them ({whole.method}; one run: {one.epsilon:.3f})"
    )
