"""Cron expressions as Kubeflow's scheduler (robfig/cron) reads them: six fields, seconds first.

Only what no version of that parser reads in another way is accepted. Times are computed here and
not by a cron library, because libraries differ in the days 29 to 31 and in two restricted days.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product

from fedemb.errors import ConfigError

YEARS_AHEAD = 5
"""Calendar years that Kubeflow's scheduler looks ahead; a later time never fires."""
_PART = re.compile(r"([*?]|\d{1,2})(?:-(\d{1,2}))?(?:/([1-9]\d?))?", re.ASCII)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]


@dataclass(frozen=True)
class _Field:
    """Range of a field, and its names in order."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    any_: str = "*"
    """Signs for all values."""


_FIELDS = (
    _Field("second", 0, 59),
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of month", 1, 31, any_="*?"),
    _Field("month", 1, 12, tuple(_MONTHS)),
    _Field("day of week", 0, 6, tuple(_DAYS), any_="*?"),
)


@dataclass(frozen=True)
class Cron:
    """Values of the six fields."""

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    """Whether one of the two day fields is enough, because both are restricted."""

    @classmethod
    def parse(cls, text: str) -> Cron:
        """Reads an expression.

        Raises:
          ConfigError: not six fields, or a field is more than `*`, numbers, rising ranges, steps
            and three letters of a name; or `*/n` in a day field with the other day restricted.
        """
        fields = text.split(" ")
        if len(fields) != len(_FIELDS):
            raise ConfigError(
                f"cron={text!r} has {len(text.split())} fields, expected six with the seconds "
                "first, separated by one space each. Use '0 0 3 * * 1' for Mondays at three."
            )
        values = [_values(text, *pair) for pair in zip(_FIELDS, fields, strict=True)]
        days = (fields[3], fields[5])
        free = [day in ("*", "?") for day in days]
        if not any(free) and any(day[0] in "*?" for day in days):
            raise ConfigError(
                f"cron={text!r} restricts both day fields, one of them by a step of *, which "
                "versions of Kubeflow's scheduler read differently. Set the other field to *."
            )
        return cls(*values, either_day=not any(day[0] in "*?" for day in days))

    def after(self, moment: datetime, end: datetime) -> Iterator[datetime]:
        """Yields the times after a moment and not after the end, both in UTC."""
        day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        clock = [sorted(part) for part in (self.hours, self.minutes, self.seconds)]
        while day <= end:
            if day.month not in self.months:
                day = _next_month(day)
                continue
            if self._on(day):
                for hour, minute, second in product(*clock):
                    time = day.replace(hour=hour, minute=minute, second=second)
                    if moment < time <= end:
                        yield time
            day += timedelta(days=1)

    def _on(self, day: datetime) -> bool:
        of_month, of_week = day.day in self.days, (day.weekday() + 1) % 7 in self.weekdays
        return of_month or of_week if self.either_day else of_month and of_week


def _values(text: str, field: _Field, written: str) -> frozenset[int]:
    """Returns the values of a field."""
    parts = written.split(",")
    found: set[int] = set()
    for part in parts:
        match = _PART.fullmatch(part)
        if part.lower() in field.names:
            found.add(field.low + field.names.index(part.lower()))
            continue
        if match is None or (match[1] in "*?" and (match[2] or len(parts) > 1)):
            raise _bad(text, field)
        if match[1] in "*?":
            if match[1] not in field.any_:
                raise _bad(text, field)
            first, last = field.low, field.high
        else:
            first = int(match[1])
            last = int(match[2]) if match[2] else field.high if match[3] else first
        if not field.low <= first <= last <= field.high:
            raise _bad(text, field)
        found.update(range(first, last + 1, int(match[3] or 1)))
    return frozenset(found)


def _bad(text: str, field: _Field) -> ConfigError:
    names = f", or a name such as {field.names[0]}" if field.names else ""
    return ConfigError(
        f"cron={text!r} has a {field.name} that is not valid. Use *, */n, a, a-b, a-b/n or a list "
        f"of numbers from {field.low} to {field.high}{names}."
    )


def _next_month(day: datetime) -> datetime:
    return (day.replace(day=28) + timedelta(days=4)).replace(day=1)


def first_beyond(start: datetime, slots: tuple[datetime, ...]) -> datetime | None:
    """Returns the first time that the scheduler does not reach from the time before; None: all."""
    for before, slot in zip((start.astimezone(UTC), *slots), slots, strict=False):
        if slot.year > before.year + YEARS_AHEAD:
            return slot
    return None
