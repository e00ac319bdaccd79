"""Features of an imported backbone, and embeddings that keep them beside the private projection.

All constants of the features come from public images: `fit_features` is called only by the step
`pretrain_public`, whose only input is a `BackboneConfig`. The constants are weights that never
train, so they travel in the file of the backbone and in the release, under its digest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.backbone_files import read_card
from fedemb.models.backbones import HEAD, without_head
from fedemb.models.inference import outputs
from fedemb.models.keras_backend import Layer, Model, Node
from fedemb.models.layers import constants, mirror_layer, whitened_layer

_LOG = logging.getLogger(__name__)

_FITTED = "public_constants"
"""Name of the layer whose constants `fit_features` computes."""
_RIDGE = 0.03
"""Penalty on the squared weights of a public head, for features of mean square 1."""
_POWER_FOR_CLASSES = 0.5
"""Power in `constants` for the features of a classifier."""
_KEPT = "public_features"
"""Name of the last layer of a model that keeps the public features."""


def tapped(backbone: Model, taps: tuple[str, ...], path: Path) -> Model:
    """Returns a model with the joined outputs of some layers, averaged over positions.

    Args:
      backbone: `keras.Model` of the file.
      taps: names from the card of the file, or names of layers; empty: the output of the model.
      path: the file.

    Raises:
      ConfigError: a tap does not exist, or its output has no features for each image.
    """
    import keras

    if not taps:
        return backbone
    pooled = [_pooled(backbone, name, path) for name in taps]
    joined = keras.layers.Concatenate(name="taps")
    outputs = joined(pooled) if len(pooled) > 1 else pooled[0]
    return keras.Model(backbone.input, outputs, name=backbone.name)


def _pooled(backbone: Model, name: str, path: Path) -> Node:
    import keras

    card = read_card(path)
    found = {tap.name: tap for tap in card.taps} if card else {}
    layer = found[name].layer if name in found else name
    layers = {item.name: item for item in backbone.layers}
    if layer not in layers:
        known = ", ".join([*found, *list(layers)[-6:]])
        raise ConfigError(
            f"model.taps: {path.name} has no layer {name!r}. Use taps of `fedemb backbone show` or "
            f"names of layers, such as {known}"
        )
    output = layers[layer].output
    place = name.replace("/", "_")
    match len(output.shape):
        case 2:
            return output
        case 3:
            return keras.layers.GlobalAveragePooling1D(name=f"tap_{place}")(output)
        case 4:
            return keras.layers.GlobalAveragePooling2D(name=f"tap_{place}")(output)
        case _:
            raise ConfigError(
                f"model.taps: layer {name!r} of {path.name} has outputs of shape "
                f"{tuple(output.shape)}. Use a layer with outputs for each image"
            )


def features_of(net: Model, images: Node, model: ModelConfig, *, mirror: bool) -> Node:
    """Returns the features of an imported network as a configuration sets them.

    Args:
      net: `keras.Model`, images to vectors.
      images: Keras tensor of images, in the network's pixel format.
      model: square root and directions.
      mirror: whether to average the outputs for the image and its mirror image.
    """
    import keras

    features = net(images)
    if mirror:
        turned = mirror_layer()(name="mirror_image")(images)
        features = keras.layers.Average(name="both_ways")([features, net(turned)])
    directions = model.principal_directions or model.whitened_directions
    if not (directions or model.square_root):
        return features
    if len(features.shape) == 2:
        features = keras.layers.Reshape((1, 1, features.shape[1]), name="one_place")(features)
    layer = whitened_layer()(
        directions=directions,
        reduce=bool(model.principal_directions),
        square_root=model.square_root,
        name=_FITTED,
    )
    return layer(features)


def _fit(
    model: Model, layer: Layer, images: np.ndarray, *, one_scale: bool = False, power: float = 1.0
) -> None:
    """Computes the constants of a whitened layer of a model; see `constants`."""
    import keras

    features = outputs(keras.Model(model.input, layer.input), images)
    if layer.square_root:
        features = np.sign(features) * np.sqrt(np.abs(features))
    found = constants(features, layer.directions, one_scale=one_scale, power=power)
    layer.set_weights([value.astype(np.float32) for value in found])


def fit_constants(backbone: Model, images: np.ndarray) -> int:
    """Computes the constants of each whitened part of a backbone.

    Args:
      backbone: from `build_backbone`.
      images: uint8 `[images, size, size, channels]`, public or drawn.

    Returns:
      The number of whitened parts.
    """
    import keras

    models = [backbone, *[layer for layer in backbone.layers if isinstance(layer, keras.Model)]]
    found = [(model, layer) for model in models for layer in model.layers]
    parts = [(model, layer) for model, layer in found if isinstance(layer, whitened_layer())]
    for part in parts:
        _fit(*part, images)
    return len(parts)


def fit_features(
    backbone: Model,
    images: UInt8[np.ndarray, "images size size channels"],
    *,
    classifies: bool = False,
) -> int:
    """Computes the constants of an imported backbone's features from public images.

    Embeddings keep the sizes of channels relative to each other: equal sizes cost recall of people
    and products, and gain accuracy of classes. Classifiers keep the square roots of the sizes of
    directions: in large directions the classes differ more (studies/photos).

    Args:
      backbone: from `import_backbone`.
      images: public images, more than there are directions.
      classifies: whether the features are for a classifier.

    Returns:
      The number of images.

    Raises:
      ConfigError: not more images than directions.
    """
    layer = backbone.get_layer(_FITTED)
    if len(images) <= layer.directions:
        raise ConfigError(
            f"{layer.directions} directions need more than {layer.directions} public images, and "
            f"pretraining.source has {len(images)}. Name a larger source, or set "
            "model.principal_directions or model.whitened_directions lower"
        )
    power = _POWER_FOR_CLASSES if classifies else 1.0
    _fit(backbone, layer, images, one_scale=not classifies, power=power)
    return len(images)


def fit_head(
    classifier: Model, classes: Sequence[str], images: np.ndarray, names: np.ndarray
) -> int:
    """Trains the head on public images of every class: logistic regression on the features.

    Args:
      classifier: its last layer is the head, whose weights are replaced.
      classes: names of its outputs.
      images: uint8 `[images, size, size, channels]`.
      names: str `[images]`, their classes; images of others are left out.

    Returns:
      The number of images used; 0 if a class has none.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    wanted = names[:, None] == np.array(classes)
    if not wanted.any(0).all():
        _LOG.info("the head starts untrained: public images lack some of the classes")
        return 0
    images, wanted = images[wanted.any(1)], wanted[wanted.any(1)]
    features = outputs(without_head(classifier), images).astype(np.float64)
    scale = np.sqrt(np.mean(features**2)) or 1.0
    rows = np.column_stack([features / scale, np.ones(len(features))])
    shape = (rows.shape[1], len(classes))

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        logs = log_softmax(rows @ flat.reshape(shape), axis=1)
        slope = rows.T @ (np.exp(logs) - wanted) / len(rows)
        value = _RIDGE / 2 * flat @ flat - logs[wanted].sum() / len(rows)
        return value, slope.ravel() + _RIDGE * flat

    found = minimize(loss, np.zeros(np.prod(shape)), jac=True, method="L-BFGS-B").x.reshape(shape)
    classifier.get_layer(HEAD).set_weights([found[:-1] / scale, found[-1]])
    return len(rows)


def needs_public_images(backbone: Model) -> bool:
    """Returns whether an imported backbone has constants that `fit_features` computes."""
    return any(layer.name == _FITTED for layer in backbone.layers)


def with_public_features(backbone: Model, weight: float) -> Model:
    """Adds the public features to the embedding: `[projection, weight * features]`.

    Projection and features have length 1 each, before the weight. Layers are shared.

    Args:
      backbone: model with a projection as its last layers.
      weight: length of the public features; 0 returns the backbone.
    """
    import keras

    if not weight:
        return backbone
    projection = next(
        layer for layer in backbone.layers if layer.name in ("embedding_hidden", "embedding")
    )
    unit = keras.layers.UnitNormalization
    private = unit(name="projection_length")(backbone.output)
    public = unit(name="features_length")(projection.input)
    public = keras.layers.Rescaling(weight, name="features_weight")(public)
    joined = keras.layers.Concatenate(name=_KEPT)
    return keras.Model(backbone.input, joined([private, public]), name=backbone.name)


def without_public_features(backbone: Model) -> Model:
    """Returns the model that private training changes: up to the projection, layers shared."""
    import keras

    if backbone.layers[-1].name != _KEPT:
        return backbone
    private = backbone.get_layer("projection_length").input
    return keras.Model(backbone.input, private, name=backbone.name)
