"""Many processes at once on local files; the same on S3 and GCS is in tests/integration."""

import pytest

from tests.kit.pipeline_runs import ledger_race


@pytest.mark.parametrize("processes", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_processes_at_once_never_pass_the_cap(tmp_path, processes):
    ledger_race.check(tmp_path, None, processes)
