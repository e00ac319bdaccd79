"""When a schedule fires: counted, and refused where two parsers could read it differently."""

from datetime import UTC, datetime, timedelta

import pytest

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
        ("0 0 3 31-31 2 *", 0),  # croniter: on the first days of February
        ("0 0 3 30-31 2,4 *", 1),
    ],
)
def test_cron_fires_the_expected_number_of_times_a_year(cron, fires):
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
        "@weekly",
        "0 0 3 */2 * 1",
        "0 0 9/4 * * *",
        "0 0 3 * * mon",
        "0 0 3 1 * ?",
        "0 0 3 *,5 * 1",
        "0 0 3 \u0663 * *",
        "0  0 3 * * *",
        "0 0 3 * * 1 2027",
        "TZ=UTC 0 0 3 * * *",
        "",
    ],
)
def test_ambiguous_cron_expressions_are_refused(cron):
    with pytest.raises(ConfigError, match="cron="):
        Cron.parse(cron)


def test_schedule_with_more_than_10000_runs_is_refused():
    with pytest.raises(ValueError, match="more than 10000 times"):
        _schedule("* * * * * *", *YEAR)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("0001-01-01T00:00:00+14:00", "2028-01-01T00:00:00Z"),
        ("2027-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00"),
        ("1969-12-31T00:00:00Z", "2028-01-01T00:00:00Z"),
    ],
)
def test_schedule_dates_outside_1970_to_2099_are_refused(start, end):
    with pytest.raises(ValueError, match="not from 1970 to 2099"):
        _schedule("0 0 3 * * 1", start, end)
