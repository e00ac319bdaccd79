"""The command that measures accelerators, without one."""

import json
import os
import subprocess
import sys

import pytest

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.bench import bench
from tests.conftest import REPOSITORY


@pytest.mark.slow
def test_figures_are_printed_and_kept_without_tensorflow(tmp_path):
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.jax.bench_without_tensorflow", file],
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


@pytest.mark.slow
def test_it_ends_in_time_even_in_the_middle_of_a_measurement(tmp_path):
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.jax.bench_without_tensorflow", file, "endless"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stopped after 2 s in the middle of a measurement" in done.stdout
    assert done.stdout.splitlines()[-1] == f"figures: {file}"
    assert json.loads(file.read_text())["device"]["platform"] == "cpu"


@pytest.mark.long
def test_an_accelerator_that_is_not_seen_is_refused_before_anything_is_measured():
    done = subprocess.run(
        [sys.executable, "-m", "fedemb", "bench", "--accelerator"],
        cwd=REPOSITORY,
        env=os.environ | {"FEDEMB_ACCELERATOR": "nvidia.com/gpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "this step is to have nvidia.com/gpu, but JAX finds only the CPU" in done.stderr
    assert "plain" not in done.stdout


def test_rounds_of_virtual_clients_are_those_of_the_docs():
    from fedemb.config import ModelConfig
    from fedemb.engine.jax.speed import WORKLOADS
    from fedemb.models.backbones import build_backbone

    first, second = WORKLOADS["W1"], WORKLOADS["W2"]
    assert first == ("lenet", 28, 1, 16, 128, 32, 4, 64)
    assert second == ("resnet8", 32, 3, 8, 64, 16, 1, 64)
    text = (REPOSITORY / "docs/explanation/performance.md").read_text()
    net = build_backbone(ModelConfig(backbone="lenet", image_size=28, channels=1), 0)
    assert f"16 virtual clients of 128 images 28 x 28 grey, LeNet ({net.count_params():,}" in text
    assert "8 virtual clients of 64 images 32 x 32 in colour, ResNet-8" in text


def test_processors_are_measured_elsewhere():
    with pytest.raises(ConfigError, match="make bench"):
        bench()
