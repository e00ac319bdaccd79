"""What a file tells of the pixels its net was trained on is what Keras itself gives such a net."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.models.imported import known_pixels
from fedemb.models.pixel_formats import rescaled
from fedemb.training import build_backbone

APPLICATIONS = {
    "MobileNet": ("mobilenet", "-1..1"),
    "MobileNetV2": ("mobilenet_v2", "-1..1"),
    "MobileNetV3Small": ("mobilenet_v3", "0..255"),
    "EfficientNetB0": ("efficientnet", "0..255"),
    "EfficientNetV2B0": ("efficientnet_v2", "0..255"),
    "ResNet50": ("resnet", "caffe"),
    "ResNet50V2": ("resnet_v2", "-1..1"),
    "VGG16": ("vgg16", "caffe"),
    "DenseNet121": ("densenet", "imagenet"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", APPLICATIONS)
def test_application_of_keras_gets_the_pixels_that_its_own_preprocessing_gives(name, tmp_path):
    import keras

    net = getattr(keras.applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=(64, 64, 3)
    )
    net.save(tmp_path / "net.keras")
    module, expected = APPLICATIONS[name]
    pixels, source = known_pixels(tmp_path / "net.keras")
    assert pixels == expected
    assert net.name in source or "its layer" in source
    photo = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3)).astype(np.float32)
    theirs = getattr(keras.applications, module).preprocess_input(photo.copy())
    images = keras.Input((64, 64, 3))
    ours = keras.Model(images, rescaled(images, pixels))(photo / 128 - 1)
    far = 0.01 if pixels == "-1..1" else 1e-3  # the run's own range ends at 0.992
    np.testing.assert_allclose(keras.ops.convert_to_numpy(ours), theirs, atol=far)


def test_net_of_this_package_tells_and_one_of_somebody_else_does_not(tmp_path):
    import keras

    path = tmp_path / "net.keras"
    build_backbone(ModelConfig(backbone="tiny", image_size=12), 0).save(path)
    assert known_pixels(path) == ("-1..1", "tiny of this package")

    def of(*layers, name="mine"):
        shape = keras.Input((12, 12, 1))
        end = keras.layers.GlobalAveragePooling2D()
        keras.Sequential([shape, *layers, end], name=name).save(path)
        return known_pixels(path)

    assert of(keras.layers.Conv2D(2, 3)) is None
    assert of(keras.layers.Conv2D(2, 3), name="tiny") is None
    bytes_first = keras.layers.Rescaling(1 / 127.5, offset=-1, name="scaled")
    assert of(bytes_first) == ("0..255", "its layer scaled")
    assert of(keras.layers.Rescaling(2.0, offset=-1)) is None
    assert of(keras.layers.Normalization(mean=[0.5], variance=[1.0]), name="resnet50") is None
