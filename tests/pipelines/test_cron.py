"""When a schedule fires: counted, and refused where two parsers could read it differently."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.errors import ConfigError
from fedemb.pipelines.cluster.schedule import Cron, Schedule

YEAR = datetime(2027, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)


def _schedule(cron: str, start: datetime, end: datetime) -> Schedule:
    return Schedule.model_validate(
        {
            "schema": "fedemb/schedule/1",
            "name": "one",
            "package": {"path": "p.yaml", "sha256": "0" * 64},
            "config": "quickstart",
            "cron": cron,
            "start": start,
            "end": end,
            "budget": {"epsilon": 1.0},
        }
    )


@pytest.mark.parametrize(
    ("cron", "fires"),
    [
        ("0 0 3 * * 1", 52),
        ("0 0 3 1 * *", 12),
        ("0 30 3 1 1,7 *", 2),
        ("0 0 */6 * * *", 4 * 365 + 1),  # midnight at both ends of the year
        ("0 0 0 29 2 *", 0),
        ("0 0 9-17/4 * * 1-5", 3 * 261),
        ("*/30 * * 1 1 *", 2880 + 1),
    ],
)
def test_fires_in_a_year(cron, fires):
    begin, end = YEAR
    assert len(_schedule(cron, begin - timedelta(seconds=1), end).slots) == fires


def test_start_is_exclusive_and_end_inclusive():
    moment, hours = datetime(2027, 5, 5, 3, tzinfo=UTC), timedelta(hours=23)
    assert len(_schedule("0 0 3 * * *", moment, moment + hours).slots) == 0
    assert len(_schedule("0 0 3 * * *", moment - hours, moment).slots) == 1


@pytest.mark.parametrize(
    "cron",
    [
        "0 3 * * 1",
        "0 0 24 * * *",
        "0 0 5-3 * * *",
        "0 0 */0 * * *",
        "0 0 3 * * 7",
        "0 0 3 * * 5-7",
        "@weekly",
        "0 0 3 */2 * 1",
        "0 0 9/4 * * *",
        "0 0 3 * * mon",
        "0 0 3 1 * ?",
        "0 0 3 *,5 * 1",
        "0 0 3 * * 07",
        "0 0 3 * * 1#2",
        "? 0 3 * * *",
        "0 0 3 1,,2 * *",
        "0 0 3 \u0663 * *",
        "0\u00a00 3 * * *",
        "0  0 3 * * *",
        "0 0 3 * * 1 2027",
        "TZ=UTC 0 0 3 * * *",
        "0 0 +3 * * *",
        "0 0 3 1-2-3 * *",
        "",
    ],
)
def test_what_two_parsers_read_differently_is_refused(cron):
    with pytest.raises(ConfigError, match="cron="):
        Cron.parse(cron)


class Kubeflow:
    """Independent reading of robfig/cron: bit sets, and a search field by field with carry."""

    RANGES = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))

    def __init__(self, text: str):
        pairs = zip(text.split(), self.RANGES, strict=True)
        read = [self._field(*pair) for pair in pairs]
        self.values, self.stars = [found for found, _ in read], [star for _, star in read]

    @staticmethod
    def _field(text: str, limits: tuple[int, int]) -> tuple[set[int], bool]:
        found, star = set[int](), False
        for part in text.split(","):
            span, _, step = part.partition("/")
            low, _, high = span.partition("-")
            if low in ("*", "?"):
                first, last, star = *limits, True
            else:
                first = int(low)
                last = int(high) if high else limits[1] if step else first
            assert limits[0] <= first <= last <= limits[1]
            found |= set(range(first, last + 1, int(step or 1)))
        return found, star

    def next(self, moment: datetime) -> datetime | None:
        """The first time after a moment; None: none in the five calendar years from then on."""
        second, minute, hour, dom, month, dow = self.values
        time, limit = moment + timedelta(seconds=1), moment.year + 5
        while time.year <= limit:
            in_dom, in_dow = time.day in dom, time.isoweekday() % 7 in dow
            day = in_dom and in_dow if self.stars[3] or self.stars[5] else in_dom or in_dow
            if time.month not in month or not day:
                time = time.replace(hour=0, minute=0, second=0) + timedelta(days=1)
            elif time.hour not in hour:
                time = time.replace(minute=0, second=0) + timedelta(hours=1)
            elif time.minute not in minute:
                time = time.replace(second=0) + timedelta(minutes=1)
            elif time.second not in second:
                time += timedelta(seconds=1)
            else:
                return time
        return None


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Expressions of any kind of part; some are refused."""

    def part(low: int, high: int) -> str:
        first = draw(st.integers(low, high))
        last = draw(st.integers(first, high))
        forms = ["*", str(first), f"{first}-{last}", f"{first:02d}", "?"]
        step = draw(st.sampled_from(["", "", "", "/1", "/2", "/7", "/99"]))
        return draw(st.sampled_from(forms)) + step

    fields = [
        ",".join(part(*limits) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))))
        for limits in Kubeflow.RANGES
    ]
    return " ".join(
        draw(st.sampled_from(["*", field])) if n != 4 else field for n, field in enumerate(fields)
    )


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(cron=expressions(), day=st.integers(0, 30 * 365))
def test_what_is_accepted_fires_when_kubeflow_fires(cron, day):
    try:
        read = Cron.parse(cron)
    except ConfigError:
        return
    moment = datetime(2024, 1, 30, 23, 59, 59, tzinfo=UTC) + timedelta(days=day)
    theirs, end = Kubeflow(cron), datetime(moment.year + 5, 12, 31, 23, 59, 59, tzinfo=UTC)
    ours = read.after(moment, end)
    for _ in range(4):
        slot = next(ours, None)
        following = theirs.next(moment)
        assert slot == (None if following is None or following > end else following)
        if slot is None:
            break
        moment = slot


@pytest.mark.parametrize(
    ("cron", "fires"),
    [
        ("0 0 3 31-31 2 *", 0),  # croniter: on the first days of February
        ("0 0 3 30-31 2,4 *", 1),
    ],
)
def test_day_that_a_library_reads_in_another_way(cron, fires):
    begin, end = YEAR
    assert len(_schedule(cron, begin, end).slots) == fires


def test_a_schedule_of_every_second_is_refused_not_counted():
    with pytest.raises(ValueError, match="more than 10000 times"):
        _schedule("* * * * * *", *YEAR)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("0001-01-01T00:00:00+14:00", "2028-01-01T00:00:00Z"),
        ("2027-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"),
        ("2027-01-01T00:00:00Z", "2100-01-01T00:00:00Z"),
        ("9999-01-01T00:00:00Z", "9999-12-31T23:59:59Z"),
        ("1969-12-31T00:00:00Z", "2028-01-01T00:00:00Z"),
    ],
)
def test_date_at_an_end_of_the_calendar_is_a_sentence(start, end):
    with pytest.raises(ValueError, match="not from 1970 to 2099"):
        _schedule("0 0 3 * * 1", start, end)
