"""A partition of tiny images."""

from pathlib import Path

import pytest
from partition_run import Partitioner


@pytest.fixture
def partition(tmp_path: Path) -> Partitioner:
    return Partitioner(tmp_path)
