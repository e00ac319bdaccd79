"""Counting how often a cron expression fires."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.errors import ConfigError
from fedemb.pipelines.schedules.cron import Cron

YEAR = datetime(2027, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "fires"),
    [
        ("0 0 3 * * 1", 52),
        ("0 0 3 * * mon", 52),
        ("0 0 3 1 * *", 12),
        ("0 30 3 1 jan,jul ?", 2),
        ("0 0 */6 * * *", 4 * 365),
        ("0 0 0 29 2 *", 0),
        ("0 0 0 13 * 5", 12 + 53 - 1),  # both restricted: either; one Friday the 13th in 2027
        ("0 0 9-17/4 * * 1-5", 3 * 261),
        ("*/30 * * 1 1 *", 2880),
    ],
)
def test_fires_in_a_year(expression, fires):
    begin, end = YEAR
    assert Cron.parse(expression).count(begin - timedelta(seconds=1), end) == fires + (
        1 if expression in ("0 0 */6 * * *", "*/30 * * 1 1 *") else 0
    )


def test_start_is_exclusive_and_end_inclusive():
    cron, moment = Cron.parse("0 0 3 * * *"), datetime(2027, 5, 5, 3, tzinfo=UTC)
    assert cron.count(moment, moment + timedelta(hours=23)) == 0
    assert cron.count(moment - timedelta(seconds=1), moment) == 1
    assert cron.count(moment, moment - timedelta(days=9)) == 0


def test_other_time_zones_are_turned_into_utc():
    cron, east = Cron.parse("0 0 3 * * *"), timezone(timedelta(hours=5))
    begin = datetime(2027, 5, 5, 7, 30, tzinfo=east)  # 02:30 UTC
    assert cron.count(begin, begin + timedelta(hours=1)) == 1


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 400 * 24 * 3600))
def test_counts_add_up_over_any_cut(cut):
    cron = Cron.parse("0 */20 3 * * 1,4")
    begin = datetime(2026, 11, 1, tzinfo=UTC)
    middle, end = begin + timedelta(seconds=cut), begin + timedelta(days=400)
    assert cron.count(begin, middle) + cron.count(middle, end) == cron.count(begin, end)


@pytest.mark.parametrize(
    "expression", ["0 3 * * 1", "0 0 24 * * *", "0 0 3 * * xyz", "0 0 5-3 * * *", "0 0 */0 * * *"]
)
def test_wrong_expressions_are_sentences(expression):
    with pytest.raises(ConfigError, match="cron="):
        Cron.parse(expression)
