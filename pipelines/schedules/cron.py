"""Cron expressions as Kubeflow reads them: six fields, seconds first, UTC.

Only what pricing a schedule needs: how often an expression fires in a span of time. The semantics
are those of the scheduler's parser (robfig/cron): `*`, `?`, `*/n`, `a-b`, `a-b/n`, lists, names of
months and weekdays, Sunday 0; where both day fields are restricted, either may match.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from fedemb.errors import ConfigError

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_FIELDS = (
    ("second", 0, 59, {}),
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, start=1)}),
    ("day of week", 0, 6, {name: number for number, name in enumerate(_WEEKDAYS)}),
)


@dataclass(frozen=True)
class Cron:
    """A parsed expression."""

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    """Day of month is unrestricted."""
    any_weekday: bool
    """Day of week is unrestricted."""

    @classmethod
    def parse(cls, expression: str) -> Cron:
        """Parses six fields.

        >>> Cron.parse("0 0 3 * * mon").hours
        frozenset({3})

        Raises:
          ConfigError: not six fields, or one of them is not understood.
        """
        fields = expression.split()
        if len(fields) != len(_FIELDS):
            raise ConfigError(
                f"cron={expression!r} has {len(fields)} fields, wanted six with the seconds first: "
                'weekly on Monday at three is "0 0 3 * * 1"'
            )
        values = [
            _parse_field(text, field, expression)
            for text, field in zip(fields, _FIELDS, strict=True)
        ]
        return cls(*values, any_day=fields[3] in "*?", any_weekday=fields[5] in "*?")

    def matches_day(self, day: date) -> bool:
        """Whether it fires on a day at all."""
        if day.month not in self.months:
            return False
        of_month = day.day in self.days
        of_week = day.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return of_month and of_week
        return of_month or of_week

    def count(self, start: datetime, end: datetime) -> int:
        """Number of times it fires after `start` and not after `end`."""
        return self._until(end) - self._until(start) if end > start else 0

    def _until(self, moment: datetime) -> int:
        """Fires from a fixed origin up to and with `moment`."""
        moment = moment.astimezone(UTC)
        per_day = len(self.seconds) * len(self.minutes) * len(self.hours)
        day, total = date(2000, 1, 1), 0
        while day < moment.date():
            total += per_day * self.matches_day(day)
            day += timedelta(days=1)
        if self.matches_day(moment.date()):
            total += sum(
                (hour, minute, second) <= (moment.hour, moment.minute, moment.second)
                for hour in self.hours
                for minute in self.minutes
                for second in self.seconds
            )
        return total


def _parse_field(
    text: str, field: tuple[str, int, int, dict[str, int]], expression: str
) -> frozenset[int]:
    name, low, high, names = field

    def number(word: str) -> int:
        value = names.get(word.lower()[:3]) if names and word.isalpha() else None
        value = int(word) if value is None else value
        if not low <= value <= high:
            raise ValueError
        return value

    values: set[int] = set()
    try:
        for part in text.split(","):
            span, slash, step = part.partition("/")
            if span in ("*", "?"):
                first, last = low, high
            else:
                begin, dash, end = span.partition("-")
                first = number(begin)
                last = number(end) if dash else (high if slash else first)
            stride = int(step) if slash else 1
            if stride < 1 or last < first:
                raise ValueError
            values.update(range(first, last + 1, stride))
    except ValueError:
        raise ConfigError(
            f"cron={expression!r}: the {name} {text!r} is not understood; wanted {low}-{high}, *, "
            "*/n, lists or ranges"
        ) from None
    return frozenset(values)
