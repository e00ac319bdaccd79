"""A million users within the memory of one machine, and growth that follows the data."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_partition import measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def test_a_million_users_are_partitioned_within_12_gigabytes_of_memory() -> None:
    tenth = measure(100_000, 3, [])
    whole = measure(1_000_000, 3, [])
    assert whole["peak_gb"] <= 12, whole
    assert whole["peak_gb"] <= 11 * tenth["peak_gb"], (tenth, whole)
    assert whole["cpu_seconds"] <= 12 * tenth["cpu_seconds"], (tenth, whole)
