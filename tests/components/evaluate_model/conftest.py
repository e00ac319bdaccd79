"""A finished training."""

import pytest

from tests.kit.pipeline_runs.evaluation_run import FinishedRun, shared_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return shared_run(tmp_path_factory.mktemp)
