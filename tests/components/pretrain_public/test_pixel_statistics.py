"""A wrong pixel format is found by the statistics that batch normalisation keeps."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedemb.config import ModelConfig, PretrainingConfig, PublicStart, SourceConfig
from fedemb.data.builtin import drawn_images
from fedemb.errors import ConfigError
from fedemb.keys import open_key_store
from fedemb.models.keras_backend import preprocess
from fedemb.models.pixel_formats import check_pixels, format_distances, rescaled
from fedemb.steps.pretrain_public import run

FORMATS = ("-1..1", "0..1", "0..255", "imagenet", "caffe")


@pytest.fixture(scope="module")
def images():
    return drawn_images(160, 16, 3, 3)


def _network(path, kind, images):
    """Saves a network whose batch normalisation has seen half of the images in one format."""
    import keras

    inputs = keras.Input((16, 16, 3))
    seen = np.asarray(keras.Model(inputs, rescaled(inputs, kind))(preprocess(images[:80])))
    norm = keras.layers.BatchNormalization()
    convolved = keras.layers.Conv2D(12, 3, kernel_initializer=keras.initializers.HeNormal(1))(
        inputs
    )
    features = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(norm(convolved)))
    net = keras.Model(inputs, features)
    before = np.asarray(keras.Model(inputs, convolved)(seen))
    axes = (0, 1, 2)
    norm.set_weights([np.ones(12), np.zeros(12), before.mean(axes), before.var(axes)])
    net.save(path)
    return path


@pytest.mark.parametrize("trained", FORMATS)
def test_only_the_format_of_the_training_is_accepted(tmp_path, images, trained):
    path = _network(tmp_path / "net.keras", trained, images)
    check_pixels(path, trained, images[80:])
    for other in set(FORMATS) - {trained}:
        with pytest.raises(ConfigError, match=f'Set import_pixels: "{trained}"'):
            check_pixels(path, other, images[80:])


def test_network_without_batch_normalisation_is_not_judged(tmp_path, images):
    import keras

    inputs = keras.Input((16, 16, 3))
    path = tmp_path / "net.keras"
    keras.Model(inputs, keras.layers.Flatten()(inputs)).save(path)
    assert format_distances(path, images) is None
    check_pixels(path, "0..255", images)


def test_public_photos_of_another_brightness_are_accepted(tmp_path, images):
    path = _network(tmp_path / "net.keras", "-1..1", images)
    check_pixels(path, "-1..1", images[80:] // 2 + 100)


def test_step_refuses_a_wrong_format_before_any_charge(tmp_path, images):
    path = _network(tmp_path / "net.keras", "0..255", images)
    packed = []
    for image in images[80:]:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        packed.append(buffer.getvalue())
    pq.write_table(
        pa.table({"image": packed, "label": ["leaf"] * len(packed)}), tmp_path / "public.parquet"
    )
    source = SourceConfig(uri=str(tmp_path / "public.parquet"))
    settings = PretrainingConfig(kind="import", import_path=str(path), source=source)
    model = ModelConfig(
        backbone="imported", image_size=16, channels=3, embedding_dim=12, trainable="head",
        projection=False, classes=("a", "b"),
    )  # fmt: skip
    start = PublicStart(model=model, pretraining=settings, seed=0)
    with pytest.raises(ConfigError, match=r'Set import_pixels: "0\.\.255"'):
        run(start, tmp_path / "out", open_key_store(str(tmp_path / "keys")))
    right = settings.model_copy(update={"import_pixels": "0..255"})
    run(start.model_copy(update={"pretraining": right}), tmp_path / "out",
        open_key_store(str(tmp_path / "keys")))  # fmt: skip
