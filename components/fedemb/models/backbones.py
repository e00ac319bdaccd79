"""Backbones: image to embedding, with group normalisation or none, never batch normalisation.

The backbones of the embedding paper match its code layer for layer (arXiv 2211.10844,
`dp_visual_embeddings/models`); a test pins their parameter counts. A backbone maps float32 images
`[batch, height, width, channels]` in [-1, 1] to embeddings `[batch, embedding_dim]`, not
normalised; `embed` scales embeddings to unit length for comparison.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.keras_backend import Model, Variable, all_layers, input_node, keras_layers
from fedemb.models.networks import NETWORKS

HEAD = "logits"
"""Name of the last layer."""


def with_head(backbone: Model, model: ModelConfig, seed: int = 0) -> Model:
    """Adds a head to a backbone, whose layers are shared.

    A zero head makes the first steps those of a convex problem; see `ModelConfig.head_init`.

    Args:
      backbone: images to features.
      model: number of classes, and initialization of the head.
      seed: seed of a randomly initialized head.
    """
    import keras

    uniform = keras.initializers.GlorotUniform(seed=seed)
    start = "zeros" if model.head_init == "zeros" else uniform
    head = keras_layers().Dense(len(model.classes), kernel_initializer=start, name=HEAD)
    return keras.Model(backbone.input, head(backbone.output), name=backbone.name)


def without_head(classifier: Model) -> Model:
    """Returns the backbone of a classifier; the layers are shared."""
    import keras

    return keras.Model(classifier.input, classifier.get_layer(HEAD).input, name=classifier.name)


# Builds a backbone from its name, and rejects backbones that private training cannot support.


# Layers whose output for one image depends on the other images of the batch, or that keep state; #
# a frozen one is a constant scale and offset.
_BATCH_DEPENDENT = ("BatchNormalization", "SyncBatchNormalization", "SpectralNormalization")


def build_backbone(model: ModelConfig, seed: int) -> Model:
    """Builds a backbone with initial weights that depend only on the seed.

    Args:
      model: name, embedding length, image size. A name with a colon, `module:function`, is
          imported; the function takes the `ModelConfig` and returns a built `keras.Model`.
      seed: seed of the initial weights.

    Returns:
      `keras.Model`: float32 images `[batch, size, size, channels]` in [-1, 1] to embeddings
      `[batch, embedding_dim]`, not normalised, or to the logits of the model's classes.

    Raises:
      ConfigError: the name is unknown, or `check_backbone` rejects the backbone.
    """
    backbone = _without_checks(model, seed)
    check_backbone(backbone, model.model_copy(update={"classes": (), "keep_public_features": 0.0}))
    return with_head(backbone, model, seed) if model.classes else backbone


def _without_checks(model: ModelConfig, seed: int) -> Model:
    import keras

    if ":" in model.backbone:
        module, function = model.backbone.split(":", 1)
        try:
            backbone = getattr(importlib.import_module(module), function)(model)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"model.backbone={model.backbone} cannot be imported ({error}); name an importable "
                "module:function, or one of " + ", ".join(NETWORKS)
            ) from error
    elif model.backbone in NETWORKS:
        if model.mirrored and model.backbone != "scatter_linear":
            raise ConfigError(
                f"model.mirrored: {model.backbone} has no mirrored features; set it to false, or "
                "take scatter_linear or an imported backbone"
            )
        inputs = input_node((model.image_size, model.image_size, model.channels), "images")
        outputs = NETWORKS[model.backbone](inputs, model)
        backbone = keras.Model(inputs, outputs, name=model.backbone)
    else:
        raise ConfigError(
            f"model.backbone={model.backbone} is not known; take one of "
            f"{', '.join(NETWORKS)}, or module:function of your own"
        )
    reinitialize(backbone, seed)
    return backbone


def reinitialize(backbone: Model, seed: int) -> None:
    """Draws all kernels, each from its own stream of the seed; other weights keep their values."""
    import numpy as np

    for index, layer in enumerate(backbone.layers):
        streams = np.random.SeedSequence([seed, index]).generate_state(2)
        for stream, part in zip(streams, ("kernel", "depthwise_kernel"), strict=True):
            weight = getattr(layer, part, None)
            initializer: Any = getattr(layer, f"{part}_initializer", None)
            settings = {} if initializer is None else initializer.get_config()
            if weight is None or "seed" not in settings:
                continue
            kind: Any = type(initializer)
            fixed = kind.from_config({**settings, "seed": int(stream >> 1)})
            weight.assign(fixed(weight.shape, dtype="float32"))


def check_backbone(backbone: Model, model: ModelConfig) -> None:
    """Rejects a backbone that mixes the images of a batch, or keeps state between calls.

    Either property would let one user's images change the computation for others, or carry private
    statistics out of the round.

    Raises:
      ConfigError: BatchNorm or similar layers, dropout, untrained state, or wrong shapes.
    """
    for layer in all_layers(backbone):
        kind = type(layer).__name__
        if kind in _BATCH_DEPENDENT and (layer.trainable or kind == "SpectralNormalization"):
            raise ConfigError(
                f"backbone layer {layer.name} is {kind}, which mixes the images of different users "
                "and keeps their statistics; use GroupNormalization or LayerNormalization, or "
                "import the backbone, which freezes it"
            )
    state = [v.path for v in backbone.non_trainable_variables if "seed_generator" in v.path]
    if state:
        raise ConfigError(
            f"backbone variable {state[0]} draws random numbers from a state of its own (dropout); "
            "leave the layer out: every seed must depend on the virtual client alone"
        )
    outputs = len(model.classes) or model.embedding_dim
    shape, wanted = tuple(backbone.output_shape), (None, outputs)
    if model.keep_public_features and len(shape) == 2 and shape[1] > outputs:
        shape = wanted  # the public features follow the projection
    size = (None, model.image_size, model.image_size, model.channels)
    if shape != wanted or tuple(backbone.input_shape) != size:
        raise ConfigError(
            f"backbone maps {tuple(backbone.input_shape)} to {shape}, wanted {size} to {wanted}; "
            "set model.image_size, model.channels and model.embedding_dim or classes to fit"
        )


def with_bfloat16(backbone: Model) -> Model:
    """Returns a copy that computes in bfloat16 on float32 weights, except for its last layer.

    Eight bits of an embedding are too few for the logits computed from it.
    """
    import keras

    policy = keras.DTypePolicy("mixed_bfloat16")
    copy = keras.models.clone_model(backbone)
    copy.set_weights(backbone.get_weights())
    last = copy.layers[-1]
    for layer in all_layers(copy, include_self=False):
        if layer is not last:
            layer.dtype_policy = policy
    return copy


# Named groups of variables that private training may change.


_PROJECTION = ("embedding/", "embedding_hidden/")


def cut(model: Model, group: str) -> tuple[Model, Model]:
    """Splits a model into its frozen part and the layers that private training changes.

    Args:
      model: a backbone or classifier, which shares its layers with both.
      group: `head` or `projection`.

    Returns:
      `keras.Model`s: images to features `[batch, features]`, and features to the model's output.

    Raises:
      ConfigError: the trainable layers are not at the end of the model.
    """
    import keras

    names = (HEAD,) if group == "head" else ("embedding_hidden", "embedding")
    first = next((layer for layer in model.layers if layer.name in names), None)
    if first is None or len(first.input.shape) != 2:
        raise ConfigError(
            f"model.trainable={group} needs a layer {names[-1]} at the end of {model.name}, on "
            "features of one axis. Rename the layer, or set another model.trainable."
        )
    return (
        keras.Model(model.input, first.input, name=model.name),
        keras.Model(first.input, model.output, name=model.name),
    )


def trainable_variables(backbone: Model, group: str = "all") -> Sequence[Variable]:
    """Returns the variables that private training may change, in the order of the model.

    Args:
      backbone: from `build_backbone` or loaded, or a classifier made of one; the head of a
          classifier trains with every group.
      group: `all`; `head`: only the head of a classifier; `projection`: the dense layers that make
          an embedding of features; `conv_frozen`: all except convolution kernels (arXiv
          2201.12328).

    Raises:
      ConfigError: the group contains no variable of this backbone.
    """
    variables = list(backbone.trainable_variables)
    chosen = {
        "all": lambda path: True,
        "head": lambda path: False,
        "projection": lambda path: path.startswith(_PROJECTION),
        "conv_frozen": lambda path: not (path.endswith("kernel") and "conv" in path),
    }[group]
    found = [v for v in variables if v.path.startswith(f"{HEAD}/") or chosen(v.path)]
    if not found:
        raise ConfigError(
            f"model.trainable={group} leaves nothing to train in {backbone.name}; take another"
            " group"
        )
    return found
