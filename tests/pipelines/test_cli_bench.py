"""The command that measures accelerators, where there is none."""

import json
import subprocess
import sys

import pytest

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.bench import bench
from tests.conftest import REPOSITORY


def test_figures_are_printed_and_kept_without_tensorflow(tmp_path):
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.bench_without_tensorflow", file],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    assert found["device"]["platform"] == "cpu"
    measured = [
        (row["precision"], row["work"], row["views"], row["microbatch"]) for row in found["rows"]
    ]
    assert measured == [
        (precision, *row)
        for precision in ("float32", "bfloat16")
        for row in (
            ("plain", 1, 16),
            ("W", 1, 2),
            ("plain", 1, 16),
            ("units", 1, 4),
            ("units", 2, 4),
        )
    ]
    for row in found["rows"]:
        assert row["microseconds_per_view"] > 0
        assert row["ratio"] == 1 if row["work"] == "plain" else row["ratio"] > 0
        assert row["work"] == "plain" or 0 < row["noise_share"] < 1
        assert row["work"] == "plain" or row["step_megabytes"] > 0
    assert "fastest unit gradients: training.unit_gradient.microbatch: 4" in done.stdout


def test_processors_are_measured_elsewhere():
    with pytest.raises(ConfigError, match="make bench"):
        bench()
