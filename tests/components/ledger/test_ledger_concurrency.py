"""Many processes at once on local files; the same on S3 and GCS is in tests/integration."""

import ledger_race
import pytest


@pytest.mark.parametrize("processes", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_processes_at_once_never_pass_the_cap(tmp_path, processes):
    ledger_race.check(tmp_path, None, processes)
