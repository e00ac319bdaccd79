"""Imports an external `.keras` file as a backbone.

The check uses only the model description, so a run can be refused before any charge, and no code of
the file is executed. Imported layers that would mix images are frozen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemb.config import ModelConfig, PretrainingConfig
from fedemb.errors import ArtifactError, ConfigError
from fedemb.foundation.canonical_json import strict_json
from fedemb.models.backbone_files import load_model, member, opened, read_card, require_finite
from fedemb.models.backbones import HEAD, check_backbone, reinitialize, without_head
from fedemb.models.keras_backend import Model, all_layers
from fedemb.models.layers import whitened_layer
from fedemb.models.networks import NETWORKS, embedding
from fedemb.models.pixel_formats import declared_pixels, rescaled
from fedemb.models.public_features import features_of, tapped

_OWN = ("MirrorImage", "Scattering", "StandardizedConv2D", "Whitened")
_PLAIN = """
Activation Add Average AveragePooling2D Concatenate Conv2D Cropping1D Cropping2D
CustomScaleLayer Dense DepthwiseConv2D Flatten Functional GlobalAveragePooling1D
GlobalAveragePooling2D GlobalMaxPooling2D GroupNormalization Identity InputLayer
LayerNormalization LayerScale LeakyReLU MaxPooling2D MultiHeadAttention Multiply Normalization
PReLU ReLU Rescaling Reshape SeparableConv2D Sequential Softmax UnitNormalization ZeroPadding2D
"""
"""Layers of Keras and keras-hub."""
ALLOWED_LAYERS = frozenset((*_PLAIN.split(), *_OWN, *(f"fedemb>{name}" for name in _OWN)))
"""Layers allowed in an imported backbone: no custom code, no state, no mixing of images."""
IF_FROZEN = frozenset({"BatchNormalization", "Dropout"})
"""Layers also allowed in a backbone that never trains: constants, or without effect."""
_SETTINGS = re.compile(r"keras(\.src)?\.(initializers|regularizers|constraints|dtype_policies)\b")
"""Allowed modules of layer settings."""
_NO_LAYERS = frozenset({"DTypePolicy", "__keras_tensor__", "__numpy__", "__tensor__", "__tuple__"})
FROZEN = ("head", "projection")
"""Values of `model.trainable` that keep the imported layers frozen."""


def check_import(path: Path, trainable: str) -> None:
    """Rejects a file that is missing or damaged, or has layers that are not allowed.

    Args:
      path: the file.
      trainable: `model.trainable`.

    Raises:
      InputError: the file does not exist.
      ArtifactError: not a `.keras` file, or it has other layers.
    """
    described = _description(path)
    allowed = ALLOWED_LAYERS | IF_FROZEN if trainable in FROZEN else ALLOWED_LAYERS
    layers = _layer_classes({**described, "compile_config": None})  # not loaded
    found = sorted(layers - allowed)
    _check_ends(described["config"], path)
    if found:
        frozen = f", or keep it frozen with model.trainable: {' or '.join(FROZEN)}"
        raise ArtifactError(
            f"{path.name} has layers that are not allowed here ({', '.join(found)}); build the "
            f"backbone of {', '.join(sorted(allowed))}{frozen if set(found) <= IF_FROZEN else ''}"
        )


def _check_ends(net: Mapping[str, Any], path: Path) -> None:
    """Rejects a network with several inputs or outputs."""
    for name in ("input", "output"):
        ends = net.get(f"{name}_layers")
        if isinstance(ends, dict) or (  # one end is `[layer, node, tensor]`
            isinstance(ends, list) and any(isinstance(end, list | dict) for end in ends)
        ):
            count = len(ends)
            if count != 1:
                raise ArtifactError(
                    f"{path.name} has {count} {name}s, and a backbone has one. Save a model from "
                    "one image to one vector of features"
                )


def with_card(path: Path, start: PretrainingConfig) -> PretrainingConfig:
    """Returns the settings of an imported file with licence and provenance from its card.

    Settings of the configuration win. A file without a card changes nothing.

    Args:
      path: the file.
      start: `pretraining` with `kind: import`.

    Raises:
      InputError: the file does not exist.
      ArtifactError: the file or its card is damaged.
      ConfigError: `import_pixels` contradicts the card.
    """
    card = read_card(path)
    if card is None:
        return start
    if start.import_pixels != card.pixels:
        raise ConfigError(
            f"pretraining.import_pixels={start.import_pixels} contradicts the card of {path.name}, "
            f'which takes {card.pixels}. Set import_pixels: "{card.pixels}"'
        )
    unset = type(start)()
    stated = {"licence": card.licence, "provenance": card.provenance}
    return start.model_copy(
        update={
            name: text
            for name, text in stated.items()
            if getattr(start, name) == getattr(unset, name)
        }
    )


def image_shape(path: Path) -> tuple[int, int] | None:
    """Returns (height and width, channels) of a file's input images; None for several sizes.

    Raises:
      InputError: the file does not exist.
      ArtifactError: not a `.keras` file.
    """
    layers = _description(path)["config"].get("layers")
    known = (
        [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    )
    inputs = [layer.get("config") for layer in known if layer.get("class_name") == "InputLayer"]
    match [each.get("batch_shape") if isinstance(each, dict) else None for each in inputs]:
        case [[None, int(height), int(width), int(channels)]] if height == width:
            return height, channels
        case _:
            return None


def check_images(path: Path, model: ModelConfig) -> None:
    """Rejects a file whose input images have another size than the configuration's.

    Raises:
      InputError: the file does not exist.
      ArtifactError: not a `.keras` file.
      ConfigError: `model.image_size` or `model.channels` differs from the file.
    """
    found = image_shape(path)
    if found is not None and found != (model.image_size, model.channels):
        size, channels = found
        raise ConfigError(
            f"model.image_size={model.image_size} with model.channels={model.channels} does not "
            f"fit {path.name}, which takes {size} x {size} pixels in {channels} channels. Set "
            f"image_size: {size} and channels: {channels}, or write the file in another size with "
            "`fedemb backbone get --size`"
        )


def known_pixels(path: Path) -> tuple[str, str] | None:
    """Returns the training pixel format as `pretraining.import_pixels`, and the evidence for it.

    None if the file does not contain the format.

    Raises:
      InputError: the file does not exist.
      ArtifactError: not a `.keras` file.
    """
    card = read_card(path)
    if card is not None:
        return card.pixels, "its card"
    return declared_pixels(_description(path)["config"])


def _description(path: Path) -> dict[str, Any]:
    """Returns the model description in the file; executes no code of the file."""
    with opened(path) as archive:
        described = strict_json(member(archive, "config.json"), f"config.json of {path.name}")
    if not isinstance(described, dict) or not isinstance(described.get("config"), dict):
        raise ArtifactError(f"{path.name} describes no model; save the backbone with Keras 3")
    return described


def _layer_classes(described: Any) -> set[str]:
    """Returns class names of a model and all inner layers, including layers in settings."""
    if not isinstance(described, dict | list):
        return set()
    children = described.values() if isinstance(described, dict) else described
    names = set[str]().union(*map(_layer_classes, children))
    if isinstance(described, dict) and "class_name" in described:
        name = str(described["class_name"])
        if name not in _NO_LAYERS and not _SETTINGS.match(str(described.get("module"))):
            names |= {name, str(described.get("registered_name") or name)}
    return names


def import_backbone(
    path: Path, model: ModelConfig, *, pixels: str = "-1..1", seed: int = 0
) -> Model:
    """Loads an external `.keras` backbone: known layers only, checked before Keras reads the file.

    Batch normalisation is frozen: with the statistics of the file it is a constant scale and offset
    per channel. Dropout is disabled.

    Args:
      path: the file; the head of a classifier of this pipeline is omitted.
      model: configuration that the backbone must match; with `trainable: projection`, a projection
          to `embedding_dim` is added if the file does not end in one.
      pixels: pixel format that the file was trained on, `pretraining.import_pixels`.
      seed: seed of the projection.

    Raises:
      ArtifactError: missing, damaged, with layers that are not allowed, or with a weight that is
        NaN or infinite.
      ConfigError: the backbone does not match `model`, or mixes the images of different users.
    """
    import keras

    check_import(path, model.trainable)
    check_images(path, model)
    backbone = load_model(path)
    require_finite(backbone)
    if backbone.layers[-1].name == HEAD:
        backbone = without_head(backbone)
    backbone = tapped(_frozen(backbone), model.taps, path)
    shared = _shares_mirror(backbone)
    if model.mirrored != shared and (shared or model.backbone in NETWORKS):
        raise ConfigError(
            f"model.mirrored={model.mirrored} with model.backbone={model.backbone} is not what "
            f"{path.name} does; set both as the run did that made the file"
        )
    mirror = model.mirrored and not shared
    if any(isinstance(layer, whitened_layer()) for layer in all_layers(backbone)):
        model = model.model_copy(update={"whitened_directions": 0})  # the file has its constants
    ends = backbone.layers[-1].name == "embedding"  # has its own projection
    fits = ends and tuple(backbone.output_shape) == (None, model.embedding_dim)
    project = model.trainable == "projection" and not fits
    if project or mirror or pixels != "-1..1" or model.changes_features:
        inputs: Any = keras.Input(
            (model.image_size, model.image_size, model.channels), name="images"
        )
        features = features_of(backbone, rescaled(inputs, pixels), model, mirror=mirror)
        outputs = embedding(features, model) if project else features
        whole = keras.Model(inputs, outputs, name=backbone.name)
        if project:
            reinitialize(whole, seed)  # the file's layers are in an inner model, unchanged
        backbone = whole
    check_backbone(backbone, model.model_copy(update={"classes": (), "keep_public_features": 0.0}))
    _check_apart(backbone, path)
    return backbone


def network_output(backbone: Model) -> Model:
    """Returns the imported network's own output: without constants, mirror image and other taps.

    With `model.taps`, it is the output of the deepest tap.
    """
    import keras

    nets = [layer for layer in backbone.layers if hasattr(layer, "layers")]
    if not nets:
        return backbone
    images = output = keras.Input(backbone.input_shape[1:])
    for layer in backbone.layers[1 : backbone.layers.index(nets[0])]:
        output = output if layer.name == "mirror_image" else layer(output)  # pixel format
    joined = nets[0].layers[-1]
    ends = joined.input if joined.name == "taps" else [nets[0].output]
    parts = [keras.Model(nets[0].input, end) for end in ends]
    return keras.Model(images, max(parts, key=lambda part: len(part.layers))(output))


def _shares_mirror(backbone: Model) -> bool:
    """Returns whether a backbone has the same features for an image and its mirror image."""
    return any(
        type(layer).__name__ == "MirrorImage" or getattr(layer, "mirrored", False)
        for layer in all_layers(backbone)
    )


def _check_apart(backbone: Model, path: Path) -> None:
    """Rejects a network whose output for an image depends on the other images of its batch.

    A layer along the wrong axis has this effect without a different name. The check also uses
    random weights, because the weights of the file may hide the effect until they train.
    """
    import numpy as np

    random = np.random.default_rng(0)
    drawn = backbone.from_config(backbone.get_config())
    drawn.set_weights([_drawn(weight.shape, random) for weight in backbone.get_weights()])
    first, *others = random.uniform(-1, 1, (3, *backbone.input_shape[1:])).astype(np.float32)
    for net in (backbone, drawn):
        alone, *along = (
            np.asarray(net(np.stack([first, other]), training=False))[0]
            for other in (first, *others)
        )
        if not all(np.isfinite(found).all() for found in (alone, *along)):
            raise ConfigError(
                f"outputs of {path.name} are not finite, so it cannot be checked whether it mixes "
                "the images of different users. Use another backbone"
            )
        if any(np.abs(found - alone).max() > 1e-3 * np.abs(alone).max() for found in along):
            raise ConfigError(
                f"what {path.name} makes of an image depends on the other images of its batch, so "
                "it mixes the images of different users; use a backbone without such a layer"
            )


def _drawn(shape: tuple[int, ...], random: Any) -> Any:
    """Draws weights that make every layer affect the output: positive scales, stable kernels."""
    if len(shape) < 2:
        return random.uniform(0.5, 1.5, shape)
    return random.normal(0, (2 / math.prod(shape[:-1])) ** 0.5, shape)


def _frozen(backbone: Model) -> Any:
    """Returns the same model without dependence on other images or on randomness."""
    layers = all_layers(backbone)
    chances = [layer for layer in layers if type(layer).__name__ == "Dropout"]
    attending = [layer for layer in layers if type(layer).__name__ == "MultiHeadAttention"]
    for layer in chances:
        layer.rate = 0.0
    for layer in attending:
        if layer._dropout:
            layer._dropout = 0.0
            chances.append(layer)
    if chances:  # rebuilt: dropout without a rate has no random state
        weights = backbone.get_weights()
        backbone = type(backbone).from_config(backbone.get_config())
        backbone.set_weights(weights)
    for layer in all_layers(backbone):
        if type(layer).__name__ == "BatchNormalization":
            layer.trainable = False
    return backbone
