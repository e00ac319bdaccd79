"""The core without TensorFlow: what it takes to train on another backend of Keras."""

import os
import subprocess
import sys

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.models.backbone_files import save_backbone
from fedemb.models.backbones import build_backbone
from fedemb.models.inference import embed
from fedemb.models.networks import NETWORKS
from tests.conftest import REPOSITORY

SMALL = ("lenet", "resnet8_ws", "scatter_linear", "wrn_16_4")
"""Saved on TensorFlow, loaded on JAX: plain and standardised kernels, Fourier transforms."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What the other process prints."""
    folder = tmp_path_factory.mktemp("saved")
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    for name in SMALL:
        model = ModelConfig(backbone=name, image_size=16, channels=3, embedding_dim=16)
        backbone = build_backbone(model, 1)
        save_backbone(backbone, folder / f"{name}.keras")
        (folder / f"{name}.json").write_text(model.model_dump_json())
        np.save(folder / f"{name}.images.npy", images)
        np.save(folder / f"{name}.embeddings.npy", embed(backbone, images, 4))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.jax.without_tensorflow", folder],
        cwd=REPOSITORY,
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_core_is_imported_and_each_backbone_built_where_tensorflow_is_not(lines):
    assert [name for kind, name, *_ in lines if kind == "built"] == list(NETWORKS)


@pytest.mark.slow
def test_a_backbone_saved_on_tensorflow_embeds_alike_on_jax(lines):
    found = {name: float(far[0]) for kind, name, *far in lines if kind == "loaded"}
    assert found.keys() == set(SMALL)
    assert max(found.values()) < 1e-5, found


def test_who_starts_such_processes_stays_on_tensorflow():
    """A worker's environment goes to whatever its tests start."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, tests.kit.pipeline_runs.host_processes as h; print(dict(os.environ))",
        ],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "KERAS_BACKEND" not in done.stdout
