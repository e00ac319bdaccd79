"""A partition of tiny images."""

from pathlib import Path

import pytest

from tests.kit.pipeline_runs.partition_run import Partitioner


@pytest.fixture
def partition(tmp_path: Path) -> Partitioner:
    return Partitioner(tmp_path)
