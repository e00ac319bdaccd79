"""DP-SGD on JAX: the records of TensorFlow, and bits that do not depend on other users."""

import os
import subprocess
import sys

import numpy as np
import pytest

from fedemb.config import ModelConfig, RunConfig, UnitGradientConfig
from fedemb.errors import ConfigError
from fedemb.models import keras_backend as backend
from fedemb.models.backbone_files import save_backbone
from fedemb.models.backbones import build_backbone, trainable_variables
from fedemb.models.keras_backend import use_backend
from fedemb.training.rounds import ClientExamples
from fedemb.training.units import UnitGradientFunction
from tests.kit.jax.without_tensorflow import said_on_jax
from tests.kit.pipeline_runs.training_run import classifier_config
from tests.kit.privacy_worlds import noiseless

pytestmark = pytest.mark.long  # each process compiles for half a minute

SIZE, UNITS, ROUND, SEED = 8, 9, 3, 9
MODEL = ModelConfig(
    backbone="resnet8",
    image_size=SIZE,
    channels=3,
    embedding_dim=16,
    classes=tuple("abc"),
    head_init="glorot",
)
CONFIG = UnitGradientConfig(images_per_unit=2, microbatch=4, views=2, flip=True, crop_padding=2)
"""As in `jax_units`, which reads what is written here."""


def _function(classifier, clip):
    mechanism = noiseless(clip)
    variables = trainable_variables(classifier, "all")
    return UnitGradientFunction(classifier, mechanism, CONFIG, variables=variables, seed=SEED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier, and units whose records TensorFlow made."""
    folder = tmp_path_factory.mktemp("units")
    classifier, random = build_backbone(MODEL, 1), np.random.default_rng(0)
    units = []
    for unit in range(UNITS):
        count = 1 + unit % 2
        images = random.integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)
        units.append(ClientExamples(0, unit, images, random.integers(0, 3, count)))
    probe = _function(classifier, 1.0)
    norms = probe(probe.initial_weights(), units, ROUND).clients[:, 0]
    clip = float(np.median(norms))  # half of them are clipped
    function = _function(classifier, clip)
    records = {
        f"record_{unit.group}": np.asarray(
            function(function.initial_weights(), [unit], ROUND).total
        )
        for unit in units
    }
    np.savez(folder / "records.npz", clip=clip, **records)
    images = {f"images_{unit.group}": unit.images for unit in units}
    labels = {f"labels_{unit.group}": unit.labels for unit in units}
    np.savez(folder / "units.npz", **images, **labels)
    save_backbone(classifier, folder / "classifier.keras")
    (folder / "model.json").write_text(MODEL.model_dump_json())
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What a process on JAX says of these units."""
    return said_on_jax("jax_units", "sound", folder)


@pytest.fixture(scope="module")
def other(folder):
    """What another says of other devices, precisions and clips."""
    return said_on_jax("jax_units", "other", folder)


@pytest.fixture(scope="module")
def faulty(folder):
    """What another says where a fault is planted."""
    return said_on_jax("jax_units", "faulty", folder)


def test_sound_rounds_are_not_refused(found):
    assert "refused" not in found, found["refused"]


def test_records_are_those_of_tensorflow_to_a_hundred_thousandth_of_the_clip(found):
    """An activation at its kink may flip by rounding and move a record further: one of nine."""
    apart = np.array(found["apart"])
    assert np.sum(apart > 1e-5) <= 1, apart
    assert apart.max() < 1e-2, apart


@pytest.mark.slow
def test_clipped_gradients_are_those_of_jax_privacy(other):
    assert max(other["oracle"]) <= 1e-5, other["oracle"]


@pytest.mark.slow
def test_records_that_count_threefold_are_not_those_of_jax_privacy(faulty):
    assert min(faulty["oracle"]) > 0.1, faulty


def test_a_record_has_the_same_bits_at_any_place_and_beside_any_neighbour(found):
    assert found["problems"] == []
    assert found["compiled"] == 1  # rounds of every size, one compilation


def test_draws_are_those_of_the_group_and_the_round(found):
    assert found["own draws"] == [True, True]


@pytest.mark.slow
def test_two_and_eight_devices_give_the_bits_of_one(other):
    assert other["device_count"] == 8
    assert other["devices"] == [True, True]


@pytest.mark.slow
def test_in_bfloat16_records_keep_the_clip_and_stand_for_themselves(other):
    wrong, cosine = other["bfloat16"]
    assert wrong == []
    assert 0.9 < cosine < 1.0


def test_nobody_and_values_that_are_no_numbers_add_nothing(found):
    assert found["empty"]
    assert found["nan"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "CountsTheFill",
        "SeededByPlace",
        "MeanOfTheBatch",
        "WeightedAfterTheClip",
        "GradientsOfAllDevices",
    ],
)
def test_a_planted_bug_is_seen(faulty, fault):
    assert faulty["faults"][fault]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leak", ["MeanOfTheBatch", "GradientsOfAllDevices", "OneDeviceOfOtherBits"]
)
def test_what_leaks_into_records_or_rounds_otherwise_is_refused_before_any_unit_is_read(
    faulty, leak
):
    assert "position in a batch of 4" in faulty["probe"][leak]


def test_a_clip_that_would_be_rounded_to_32_bits_is_refused(found):
    assert "float64" in found["narrow"]


def test_too_little_memory_is_one_sentence_with_the_setting_to_lower(found):
    assert "Lower training.unit_gradient.microbatch" in found["memory"]


def test_an_accelerator_that_jax_does_not_see_is_one_sentence(found):
    said = found["refusals"]
    assert said["alone"] == 8
    assert "this step is to have nvidia.com/gpu, but JAX finds only the CPU" in said["promised"]
    assert "no NVIDIA driver found" in said["promised"]
    assert "470.57.02', and CUDA 12 needs 525" in said["old"]


def test_jax_for_two_kinds_of_accelerator_is_refused_in_one_sentence(found):
    assert "(jax-cuda12-plugin, libtpu) and may take either" in found["refusals"]["two"]


def test_a_pipeline_of_the_other_backend_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setenv("FEDEMB_BACKEND", "jax")
    with pytest.raises(ConfigError, match="images of this pipeline train on jax"):
        use_backend("tensorflow")


def test_a_gpu_is_told_to_give_the_same_bits_again():
    say = (
        "import os, fedemb.models.keras_backend as b; "
        "b.use_backend('jax'); print(os.environ['XLA_FLAGS'])"
    )
    for flags, wanted in (
        ("--xla_cpu_x=1", "--xla_cpu_x=1 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", say],
            env=os.environ | {"XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(wanted)


def test_one_process_runs_one_backend():
    use_backend("tensorflow")
    with pytest.raises(ConfigError, match="Keras runs on tensorflow in this process"):
        use_backend("jax")


def test_tensorflow_where_it_is_not_installed_is_one_sentence(monkeypatch):
    """As in the images gpu and tpu."""
    monkeypatch.setattr(backend, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"not installed here; set training\.backend: jax"):
        use_backend("tensorflow")


def test_jax_is_refused_for_what_it_does_not_train():
    assert classifier_config(**{"training.backend": "jax"}).training.backend == "jax"
    with pytest.raises(ValueError, match=r"backend=jax does not support .*=dp_covariance"):
        RunConfig.model_validate({"training": {"backend": "jax", "algorithm": "dp_covariance"}})
