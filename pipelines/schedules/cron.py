"""Cron expressions as Kubeflow's scheduler (robfig/cron) reads them: six fields, seconds first.

Only what no version of that parser reads in another way is accepted: numbers, rising ranges, lists,
steps, and one of the two day fields. Times are computed here and not by a cron library, because
libraries differ in the days 29 to 31.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import product

from fedemb.errors import ConfigError

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
