"""Somebody else's `.keras` file as a backbone.

Whether it may be one is told from its description alone, so a run can be refused before anything is
charged, and nothing of the file is executed. What is taken is frozen where it would mix images.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from fedemb.config import ModelConfig
from fedemb.embedding.backbones import blocks
from fedemb.embedding.backbones.build import check_backbone, reinitialize
from fedemb.embedding.classifier import HEAD, without_head
from fedemb.embedding.loading import load_model
from fedemb.errors import ArtifactError, ConfigError, InputError

ALLOWED_LAYERS = frozenset(
    {
        "Activation",
        "Add",
        "AveragePooling2D",
        "Concatenate",
        "Conv2D",
        "Cropping2D",
        "Dense",
        "DepthwiseConv2D",
        "Flatten",
        "Functional",
        "GainConv2D",
        "GlobalAveragePooling2D",
        "GlobalMaxPooling2D",
        "GroupNormalization",
        "Identity",
        "InputLayer",
        "LayerNormalization",
        "LeakyReLU",
        "MaxPooling2D",
        "Multiply",
        "Normalization",
        "PReLU",
        "ReLU",
        "Rescaling",
        "Reshape",
        "SeparableConv2D",
        "Scattering",
        "Sequential",
        "Softmax",
        "StandardizedConv2D",
        "UnitNormalization",
        "Whitened",
        "ZeroPadding2D",
        "fedemb>GainConv2D",
        "fedemb>Scattering",
        "fedemb>StandardizedConv2D",
        "fedemb>Whitened",
    }
)
"""Layers an imported backbone may have: no code of its own, no state, no mixing of images."""
IF_FROZEN = frozenset({"BatchNormalization", "Dropout"})
"""Layers that one which never trains may have besides: constants then, or nothing."""
FROZEN = ("head", "projection")
"""What `model.trainable` says where the imported layers stay as they are."""


def check_import(path: Path, trainable: str) -> None:
    """Refuses a file that is missing or damaged, or has layers that are not allowed.

    Args:
      path: the file.
      trainable: `model.trainable`.

    Raises:
      InputError: there is no such file.
      ArtifactError: it is no `.keras` file, or has other layers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
    except FileNotFoundError as error:
        raise InputError(
            f"pretraining.import_path={path} does not exist; name a .keras file"
        ) from error
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path.name} is not a .keras file; save the backbone with Keras 3"
        ) from error
    allowed = ALLOWED_LAYERS | IF_FROZEN if trainable in FROZEN else ALLOWED_LAYERS
    found = sorted(_layer_classes(config) - allowed)
    if found:
        frozen = f", or keep it frozen with model.trainable: {' or '.join(FROZEN)}"
        raise ArtifactError(
            f"{path.name} has layers that are not allowed here ({', '.join(found)}); build the "
            f"backbone of {', '.join(sorted(allowed))}{frozen if set(found) <= IF_FROZEN else ''}"
        )


def _layer_classes(config: Any) -> set[str]:
    """Class names of a model's configuration and of all layers inside, however deep."""
    names = {str(config.get("class_name"))}
    if config.get("registered_name") not in (None, config.get("class_name")):
        names.add(str(config["registered_name"]))
    inner = config.get("config")
    for layer in inner.get("layers", []) if isinstance(inner, dict) else []:
        names |= _layer_classes(layer)
    return names


_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet's red, green and blue in [0, 1]."""
_CAFFE = (103.939, 116.779, 123.68)
"""Mean of ImageNet's blue, green and red in [0, 255]."""


def import_backbone(path: Path, model: ModelConfig, *, pixels: str = "-1..1", seed: int = 0) -> Any:
    """Loads somebody else's `.keras` backbone: known layers only, checked before Keras reads it.

    Batch normalisation is frozen: with the statistics of the file it is a constant scale and offset
    for each channel. Dropout is switched off.

    Args:
      path: the file; the head of a classifier of this pipeline is left out.
      model: what the backbone must fit; with `trainable: projection` a file that does not end in
        a projection to `embedding_dim` gets one.
      pixels: what the file was trained on, `pretraining.import_pixels`.
      seed: of the projection.

    Raises:
      ArtifactError: missing, damaged, or with layers that are not allowed.
      ConfigError: it does not fit `model`, or mixes the images of different users.
    """
    import keras

    check_import(path, model.trainable)
    backbone = load_model(path)
    if backbone.layers[-1].name == HEAD:
        backbone = without_head(backbone)
    backbone = _frozen(backbone)
    ends = backbone.layers[-1].name == "embedding"  # in a projection of its own
    fits = ends and tuple(backbone.output_shape) == (None, model.embedding_dim)
    project = model.trainable == "projection" and not fits
    if project or pixels != "-1..1":
        inputs = keras.Input((model.image_size, model.image_size, model.channels), name="images")
        features = backbone(_rescaled(inputs, pixels))
        outputs = blocks.embedding(features, model) if project else features
        whole = keras.Model(inputs, outputs, name=backbone.name)
        if project:
            reinitialize(whole, seed)  # the file's own layers lie inside of one, untouched
        backbone = whole
    check_backbone(backbone, model.model_copy(update={"classes": ()}))
    return backbone


def _frozen(backbone: Any) -> Any:
    """The same model without what depends on other images or on chance."""
    chances = [layer for layer in backbone._flatten_layers() if type(layer).__name__ == "Dropout"]
    for layer in chances:
        layer.rate = 0.0
    if chances:  # built again: dropout without a rate has no random state
        weights = backbone.get_weights()
        backbone = type(backbone).from_config(backbone.get_config())
        backbone.set_weights(weights)
    for layer in backbone._flatten_layers():
        if type(layer).__name__ == "BatchNormalization":
            layer.trainable = False
    return backbone


def _rescaled(images: Any, pixels: str) -> Any:
    """Images in [-1, 1] as the file knows them, by a fixed convolution of one pixel."""
    import keras
    import numpy as np

    if pixels == "-1..1":
        return images
    channels = images.shape[-1]
    scale, offset, order = np.ones(channels), np.zeros(channels), np.arange(channels)
    if pixels in ("imagenet", "caffe") and channels == 1:
        raise ConfigError(
            f"pretraining.import_pixels={pixels} is of colour photos, got model.channels=1; set "
            "model.channels: 3"
        )
    if pixels == "0..1":
        scale, offset = scale / 2, offset + 1 / 2
    elif pixels == "0..255":
        scale, offset = scale * 255 / 2, offset + 255 / 2
    elif pixels == "imagenet":
        mean, deviation = (np.array(item) for item in _IMAGENET)
        scale, offset = 1 / 2 / deviation, (1 / 2 - mean) / deviation
    else:
        scale, offset, order = scale * 255 / 2, 255 / 2 - np.array(_CAFFE), order[::-1]
    fixed: Any = keras.layers.Conv2D(channels, 1, kernel_initializer="zeros", name="pixels")
    output = fixed(images)
    kernel = np.eye(channels)[:, order] * scale
    fixed.set_weights([kernel[None, None].astype(np.float32), offset.astype(np.float32)])
    fixed.trainable = False
    return output
