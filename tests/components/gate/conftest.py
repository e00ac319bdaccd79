"""One good run for the session; every test bends a copy."""

import pytest

from tests.kit.pipeline_runs import honest_run


@pytest.fixture
def good_run(allowed_run):
    return allowed_run


@pytest.fixture
def run(good_run, tmp_path):
    """A copy of the good run that the test may change."""
    return honest_run.copy_of(good_run, tmp_path / "run")
