"""A schedule: a recurring run as reviewed data, and the moments at which it fires."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AwareDatetime, Field, PositiveFloat, model_validator

from fedemb.config import Name, Section
from fedemb.pipelines.schedules.cron import YEARS_AHEAD, Cron, first_beyond

MARK = "fedemb/schedule/1"
"""First word of the description of every recurring run that is ours to change."""
MOST_RUNS = 10_000


FIRST_YEAR, LAST_YEAR = 1970, 2200
"""Years of a schedule; beyond them calendars end, in one time zone before another."""


def _in_calendar(moment: datetime) -> datetime:
    if not FIRST_YEAR <= moment.year <= LAST_YEAR:
        raise ValueError(
            f"{moment.year} is not a year from {FIRST_YEAR} to {LAST_YEAR}; name a nearer date"
        )
    return moment


Moment = Annotated[AwareDatetime, AfterValidator(_in_calendar)]


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
    start: Moment
    """No run before. Fixed, so that the number of runs is."""
    end: Moment
    """No run after. A schedule without end has no price."""
    no_catchup: Literal[True]
    """Missed intervals are not run afterwards."""
    max_concurrency: Literal[1]
    """Two runs at once would race for one budget."""
    enabled: bool = True
    service_account: str = "fedemb-run"
    pipeline_root: str | None = None
    """Public root; null: that of the namespace."""
    beam_options: tuple[str, ...] = ()
    """Options of the Beam engine that partitions the users, e.g. --runner=DataflowRunner."""
    mlflow: str | None = None
    """Tracking server of MLflow that receives each ended run, http(s)://; null: none."""
    budget: ScheduleBudget

    @model_validator(mode="after")
    def _check(self) -> Self:
        Cron.parse(self.cron)
        if self.end <= self.start:
            raise ValueError(f"end={self.end} is not after start={self.start}. Set a later end.")
        if len(self.slots) > MOST_RUNS:
            raise ValueError(
                f"cron={self.cron!r} fires more than {MOST_RUNS} times; run less often"
            )
        if beyond := first_beyond(self.start, self.slots):
            raise ValueError(
                f"cron={self.cron!r} fires on {beyond:%Y-%m-%d} only after more than {YEARS_AHEAD} "
                "years without a run, which Kubeflow's scheduler does not look ahead. Set an "
                "earlier end, or a cron that fires more often."
            )
        return self

    @property
    def rare(self) -> str:
        """Warning about a schedule that fires never or once; empty: it fires more often."""
        between = f"from {self.start:%Y-%m-%d} to {self.end:%Y-%m-%d}"
        if not self.slots:
            return f"cron={self.cron!r} never fires {between}. Correct the cron or the dates."
        if len(self.slots) == 1:
            only = f"{self.slots[0]:%Y-%m-%d %H:%M:%S} UTC"
            return f"cron={self.cron!r} fires once {between}, at {only}."
        return ""

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

    @property
    def runs(self) -> int:
        """Runs from start to end."""
        return len(self.slots)


def as_utc(moment: datetime) -> datetime:
    """A moment in UTC without fractions of a second, as the API keeps it."""
    return moment.astimezone(UTC).replace(microsecond=0)
