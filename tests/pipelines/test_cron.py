"""When a schedule fires: counted, and refused where two parsers could read it differently."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.errors import ConfigError
from fedemb.pipelines.schedules.schedule import Schedule, check_cron

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
            "no_catchup": True,
            "max_concurrency": 1,
            "budget": {"epsilon": 1.0},
        }
    )


@pytest.mark.parametrize(
    ("cron", "fires"),
    [
        ("0 0 3 * * 1", 52),
        ("0 0 3 * * mon", 52),
        ("0 0 3 1 * *", 12),
        ("0 30 3 1 jan,jul ?", 2),
        ("0 0 */6 * * *", 4 * 365 + 1),  # midnight at both ends of the year
        ("0 0 0 29 2 *", 0),
        ("0 0 0 13 * 5", 12 + 53 - 1),  # both restricted: either; one Friday the 13th in 2027
        ("0 0 9-17/4 * * 1-5", 3 * 261),
        ("*/30 * * 1 1 *", 2880 + 1),
        ("0 0 9/4 * * *", 4 * 365),
    ],
)
def test_fires_in_a_year(cron, fires):
    begin, end = YEAR
    assert _schedule(cron, begin - timedelta(seconds=1), end).runs == fires


def test_start_is_exclusive_and_end_inclusive():
    moment, hours = datetime(2027, 5, 5, 3, tzinfo=UTC), timedelta(hours=23)
    assert _schedule("0 0 3 * * *", moment, moment + hours).runs == 0
    assert _schedule("0 0 3 * * *", moment - hours, moment).runs == 1


def test_other_time_zones_are_turned_into_utc():
    east = timezone(timedelta(hours=5))
    begin = datetime(2027, 5, 5, 7, 30, tzinfo=east)  # 02:30 UTC
    assert _schedule("0 0 3 * * *", begin, begin + timedelta(hours=1)).slots == (
        datetime(2027, 5, 5, 3, tzinfo=UTC),
    )


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 400 * 24 * 3600))
def test_counts_add_up_over_any_cut(cut):
    begin = datetime(2026, 11, 1, tzinfo=UTC)
    middle, end = begin + timedelta(seconds=cut), begin + timedelta(days=401)
    whole = _schedule("0 */20 3 * * 1,4", begin, end)
    rest = _schedule("0 */20 3 * * 1,4", middle, end)
    assert whole.runs_until(middle) + rest.runs == whole.runs
    assert whole.next_run(middle) == (rest.slots[0] if rest.runs else None)


@pytest.mark.parametrize(
    "cron",
    [
        "0 3 * * 1",
        "0 0 24 * * *",
        "0 0 3 * * xyz",
        "0 0 5-3 * * *",
        "0 0 */0 * * *",
        "0 0 3 * * 7",
        "0 0 3 * * 5-7",
        "0 0 3 l * *",
        "0 0 r * * *",
        "@weekly",
        "0 0 3 */2 * 1",
    ],
)
def test_what_two_parsers_read_differently_is_refused(cron):
    with pytest.raises(ConfigError, match="cron="):
        check_cron(cron)


def test_a_schedule_of_every_second_is_refused_not_counted():
    with pytest.raises(ValueError, match="more than 10000 times"):
        _schedule("* * * * * *", *YEAR)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("0001-01-01T00:00:00+14:00", "2028-01-01T00:00:00Z"),
        ("2027-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"),
        ("9999-01-01T00:00:00Z", "9999-12-31T23:59:59Z"),
        ("1969-12-31T00:00:00Z", "2028-01-01T00:00:00Z"),
    ],
)
def test_date_at_an_end_of_the_calendar_is_a_sentence(start, end):
    with pytest.raises(ValueError, match="not a year from 1970 to 2200"):
        _schedule("0 0 3 * * 1", start, end)
