"""One good run for the session; every test bends a copy."""

import pytest

from tests.kit.pipeline_runs import honest_run


@pytest.fixture
def run(allowed_run, tmp_path):
    """A copy of the good run that the test may change."""
    return honest_run.copy_of(allowed_run, tmp_path / "run")
