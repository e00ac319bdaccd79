"""Backbones by name: image to embedding, normalised by groups and never by batch.

Layer for layer those of the paper (arXiv 2211.10844, `dp_visual_embeddings/models`), with the
parameter counts pinned by a test. A backbone maps float32 images `[batch, height, width, channels]`
in [-1, 1] to embeddings `[batch, embedding_dim]`, not normalised; unit length is put on where
embeddings are compared (`embed`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from fedemb.config import ModelConfig
from fedemb.embedding.standardized import standardized_convolution
from fedemb.errors import ConfigError

# Layers whose output for one image depends on the other images of the batch, or that keep state.
_BATCH_DEPENDENT = ("BatchNormalization", "SyncBatchNormalization", "SpectralNormalization")


def _layers() -> Any:
    import keras

    return keras.layers


def _convolution(standardized: bool) -> Any:
    return standardized_convolution() if standardized else _layers().Conv2D


def _group_norm(x: Any, name: str, groups: int, epsilon: float = 1e-5) -> Any:
    return _layers().GroupNormalization(groups=groups, epsilon=epsilon, name=name)(x)


def _lenet(x: Any, dim: int) -> Any:
    """Two 5x5 convolutions and one dense layer: 453,632 parameters at 28x28x1, 128."""
    layers = _layers()
    for index, filters in enumerate((32, 64), start=1):
        x = layers.Conv2D(filters, 5, padding="same", activation="relu", name=f"block{index}_conv")(
            x
        )
        x = layers.MaxPooling2D(2, padding="same", name=f"block{index}_pool")(x)
    return layers.Dense(dim, name="embedding")(layers.Flatten(name="flatten")(x))


def _tiny(x: Any, dim: int) -> Any:
    """Three strided convolutions, at most 60,000 parameters at 28x28x1: the quickstart's."""
    layers = _layers()
    for index, (filters, kernel) in enumerate(((16, 5), (32, 3), (22, 3)), start=1):
        x = layers.Conv2D(
            filters, kernel, strides=2, padding="same", activation="relu", name=f"block{index}_conv"
        )(x)
    return layers.Dense(dim, name="embedding")(layers.Flatten(name="flatten")(x))


def _basic_block(x: Any, conv: Any, filters: int, stride: int, name: str) -> Any:
    layers = _layers()
    shortcut = x
    x = conv(filters, 3, strides=stride, padding="same", use_bias=False, name=f"{name}_conv1")(x)
    x = layers.ReLU(name=f"{name}_relu1")(_group_norm(x, f"{name}_norm1", 8))
    x = conv(filters, 3, padding="same", use_bias=False, name=f"{name}_conv2")(x)
    x = _group_norm(x, f"{name}_norm2", 8)
    if stride != 1 or shortcut.shape[-1] != filters:
        shortcut = conv(filters, 1, strides=stride, use_bias=False, name=f"{name}_shortcut_conv")(
            shortcut
        )
        shortcut = _group_norm(shortcut, f"{name}_shortcut_norm", 8)
    return layers.ReLU(name=f"{name}_relu2")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _small_resnet(blocks: int, *, standardized: bool = False) -> Callable[[Any, int], Any]:
    """ResNet-(6 x blocks + 2) for small images, 16/32/64 channels, GroupNorm with 8 groups."""

    def build(x: Any, dim: int) -> Any:
        layers, conv = _layers(), _convolution(standardized)
        x = conv(16, 3, padding="same", use_bias=False, name="stem_conv")(x)
        x = layers.ReLU(name="stem_relu")(_group_norm(x, "stem_norm", 8))
        for stage, filters in enumerate((16, 32, 64), start=1):
            for index in range(1, blocks + 1):
                stride = 2 if stage > 1 and index == 1 else 1
                x = _basic_block(x, conv, filters, stride, f"block{stage}_{index}")
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        return layers.Dense(dim, name="embedding")(x)

    return build


def _bottleneck(x: Any, layer: Any, filters: int, stride: int, name: str) -> Any:
    layers = _layers()

    def conv(y: Any, width: int, kernel: int, stride: int, suffix: str) -> Any:
        if kernel == 3:
            y = layers.ZeroPadding2D(1, name=f"{name}_pad{suffix}")(y)
        y = layer(
            width,
            kernel,
            strides=stride,
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=_decay(),
            name=f"{name}_conv{suffix}",
        )(y)
        return _group_norm(y, f"{name}_norm{suffix}", 32)

    shortcut = x
    if stride != 1 or x.shape[-1] != 4 * filters:
        shortcut = conv(x, 4 * filters, 1, stride, "0")
    x = layers.ReLU(name=f"{name}_relu1")(conv(x, filters, 1, 1, "1"))
    x = layers.ReLU(name=f"{name}_relu2")(conv(x, filters, 3, stride, "2"))
    x = conv(x, 4 * filters, 1, 1, "3")
    return layers.ReLU(name=f"{name}_relu3")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _decay() -> Any:
    import keras

    return keras.regularizers.L2(1e-4)


def _resnet50(*, standardized: bool = False) -> Callable[[Any, int], Any]:
    """ResNet-50 v1.5 with GroupNorm(32): 23,770,304 parameters at RGB, 128.

    As in the paper's code, convolutions and the dense layer add `1e-4 x sum of squares` to the
    local loss.
    """

    def build(x: Any, dim: int) -> Any:
        import keras

        layers, conv = _layers(), _convolution(standardized)
        x = layers.ZeroPadding2D(3, name="stem_pad")(x)
        x = conv(
            64,
            7,
            strides=2,
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=_decay(),
            name="stem_conv",
        )(x)
        x = layers.ReLU(name="stem_relu")(_group_norm(x, "stem_norm", 32))
        x = layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
        x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
        for stage, (filters, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
            for index in range(1, count + 1):
                stride = 2 if stage > 2 and index == 1 else 1
                x = _bottleneck(x, conv, filters, stride, f"stage{stage}_{index}")
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        return layers.Dense(
            dim,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
            kernel_regularizer=_decay(),
            bias_regularizer=_decay(),
            name="embedding",
        )(x)

    return build


def _inverted_residual(x: Any, expand: int, filters: int, stride: int, name: str) -> Any:
    layers = _layers()

    def norm(y: Any, suffix: str) -> Any:
        return _group_norm(y, f"{name}_{suffix}_norm", 2, 1e-3)

    shortcut, width = x, x.shape[-1]
    if expand > 1:
        x = layers.Conv2D(expand * width, 1, use_bias=False, name=f"{name}_expand_conv")(x)
        x = layers.ReLU(6.0, name=f"{name}_expand_relu")(norm(x, "expand"))
    if stride == 2:
        x = layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    x = layers.DepthwiseConv2D(
        3,
        strides=stride,
        padding="same" if stride == 1 else "valid",
        use_bias=False,
        name=f"{name}_depthwise_conv",
    )(x)
    x = layers.ReLU(6.0, name=f"{name}_depthwise_relu")(norm(x, "depthwise"))
    x = norm(layers.Conv2D(filters, 1, use_bias=False, name=f"{name}_project_conv")(x), "project")
    if stride == 1 and width == filters:
        x = layers.Add(name=f"{name}_add")([x, shortcut])
    return x


_MOBILENET = (
    (1, 1, 16, 1),
    (6, 2, 24, 2),
    (6, 2, 32, 3),
    (6, 2, 64, 4),
    (6, 1, 96, 3),
    (6, 2, 160, 3),
    (6, 1, 320, 1),
)
"""Stages of MobileNetV2: expansion, stride of the first block, channels, blocks."""


def _mobilenet(stages: int, last: int) -> Callable[[Any, int], Any]:
    """MobileNetV2 with GroupNorm(2): 2,387,840 parameters, or 159,296 with three stages."""

    def build(x: Any, dim: int) -> Any:
        layers = _layers()
        x = layers.ZeroPadding2D(1, name="stem_pad")(x)
        x = layers.Conv2D(32, 3, strides=2, use_bias=False, name="stem_conv")(x)
        x = layers.ReLU(6.0, name="stem_relu")(_group_norm(x, "stem_norm", 2, 1e-3))
        for stage, (expand, stride, filters, count) in enumerate(_MOBILENET[:stages], start=1):
            for index in range(1, count + 1):
                name = f"block{stage}_{index}"
                x = _inverted_residual(x, expand, filters, stride if index == 1 else 1, name)
        x = layers.Conv2D(last, 1, use_bias=False, name="last_conv")(x)
        x = layers.ReLU(6.0, name="last_relu")(_group_norm(x, "last_norm", 2, 1e-3))
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        return layers.Dense(dim, name="embedding")(x)

    return build


BACKBONES: dict[str, Callable[[Any, int], Any]] = {
    "lenet": _lenet,
    "mobilenet_small": _mobilenet(3, 640),
    "mobilenetv2": _mobilenet(7, 1280),
    "resnet14": _small_resnet(2),
    "resnet14_ws": _small_resnet(2, standardized=True),
    "resnet50": _resnet50(),
    "resnet50_ws": _resnet50(standardized=True),
    "resnet8": _small_resnet(1),
    "resnet8_ws": _small_resnet(1, standardized=True),
    "tiny": _tiny,
}
"""Name in the configuration to layers: `(input tensor, embedding_dim) -> output tensor`; `_ws`:
with standardised weights (`standardized.py`)."""


def build_backbone(model: ModelConfig, seed: int) -> Any:
    """Builds a backbone with initial weights that depend on the seed alone.

    Args:
      model: name, embedding length, image size. A name with a colon, `module:function`, is
        imported; the function takes the `ModelConfig` and returns a built `keras.Model`.
      seed: of the initial weights.

    Returns:
      `keras.Model`: float32 images `[batch, size, size, channels]` in [-1, 1] to embeddings
      `[batch, embedding_dim]`, not normalised.

    Raises:
      ConfigError: no backbone of that name, or one that `check_backbone` refuses.
    """
    import keras

    if ":" in model.backbone:
        module, function = model.backbone.split(":", 1)
        try:
            backbone = getattr(importlib.import_module(module), function)(model)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"model.backbone={model.backbone} cannot be imported ({error}); name an importable "
                "module:function, or one of " + ", ".join(BACKBONES)
            ) from error
    elif model.backbone in BACKBONES:
        inputs = keras.Input((model.image_size, model.image_size, model.channels), name="images")
        outputs = BACKBONES[model.backbone](inputs, model.embedding_dim)
        backbone = keras.Model(inputs, outputs, name=model.backbone)
    else:
        raise ConfigError(
            f"model.backbone={model.backbone} is not known; take one of {', '.join(BACKBONES)}, or "
            "module:function of your own"
        )
    check_backbone(backbone, model)
    reinitialize(backbone, seed)
    return backbone


def reinitialize(backbone: Any, seed: int) -> None:
    """Draws all kernels anew, each from its own stream of the seed; other weights stay as built."""
    import numpy as np

    for index, layer in enumerate(backbone.layers):
        streams = np.random.SeedSequence([seed, index]).generate_state(2)
        for stream, part in zip(streams, ("kernel", "depthwise_kernel"), strict=True):
            weight = getattr(layer, part, None)
            initializer = getattr(layer, f"{part}_initializer", None)
            if weight is None or initializer is None:
                continue
            fixed = type(initializer).from_config(
                {**initializer.get_config(), "seed": int(stream >> 1)}
            )
            weight.assign(fixed(weight.shape, dtype="float32"))


def check_backbone(backbone: Any, model: ModelConfig) -> None:
    """Refuses a backbone that mixes the images of a batch, or keeps state between calls.

    Either would let one user's images change what the engine computes for others, or carry
    private statistics out of the round.

    Raises:
      ConfigError: BatchNorm and its kin, dropout, untrained state, or shapes that do not fit.
    """
    for layer in backbone._flatten_layers():
        kind = type(layer).__name__
        if kind in _BATCH_DEPENDENT:
            raise ConfigError(
                f"backbone layer {layer.name} is {kind}, which mixes the images of different users "
                "and keeps their statistics; use GroupNormalization or LayerNormalization"
            )
    state = [v.path for v in backbone.non_trainable_variables if "seed_generator" in v.path]
    if state:
        raise ConfigError(
            f"backbone variable {state[0]} draws random numbers from a state of its own (dropout); "
            "leave the layer out: every seed must depend on the virtual client alone"
        )
    shape, wanted = tuple(backbone.output_shape), (None, model.embedding_dim)
    size = (None, model.image_size, model.image_size, model.channels)
    if shape != wanted or tuple(backbone.input_shape) != size:
        raise ConfigError(
            f"backbone maps {tuple(backbone.input_shape)} to {shape}, wanted {size} to {wanted}; "
            "set model.image_size, model.channels and model.embedding_dim to fit"
        )


def with_bfloat16(backbone: Any) -> Any:
    """A copy that computes in bfloat16 on float32 weights, but for its last layer.

    Eight bits of an embedding are too few for the logits made of it.
    """
    import keras

    policy = keras.DTypePolicy("mixed_bfloat16")
    copy = keras.models.clone_model(backbone)
    copy.set_weights(backbone.get_weights())
    last = copy.layers[-1]
    for layer in copy._flatten_layers(include_self=False):
        if layer is not last:
            layer.dtype_policy = policy
    return copy


def _is_norm(path: str) -> bool:
    return path.endswith(("/gamma", "/beta"))


def _block(path: str) -> str:
    return path.split("/", 1)[0].split("_", 1)[0]


def _frozen_convolution(name: str, path: str) -> bool:
    if not path.endswith("kernel") or "conv" not in path:
        return False
    if name.startswith("resnet50"):  # the paper freezes the convolutions of stages 3 and 4 only
        return path.startswith(("stage3", "stage4"))
    return True


def trainable_variables(backbone: Any, group: str = "all") -> Sequence[Any]:
    """Variables of the backbone that private training may change, in the order of the backbone.

    Args:
      backbone: from `build_backbone` or loaded.
      group: `all`; `norm_only`: scales and offsets of normalisation layers; `last_block`: the last
        block of layers and the dense layer; `dense_only`: the dense layer that gives the
        embedding; `conv_frozen`: all but convolution kernels (ResNet-50: but those of stages 3 and
        4; paper.md (a) 12).

    Raises:
      ConfigError: the group holds no variable of this backbone.
    """
    variables = list(backbone.trainable_variables)
    blocks = [_block(v.path) for v in variables if not v.path.startswith("embedding/")]
    last = [
        v
        for v in variables
        if v.path.startswith("embedding/") or (blocks and _block(v.path) == blocks[-1])
    ]
    groups = {
        "all": variables,
        "norm_only": [v for v in variables if _is_norm(v.path)],
        "last_block": last,
        "dense_only": [v for v in variables if v.path.startswith("embedding/")],
        "conv_frozen": [v for v in variables if not _frozen_convolution(backbone.name, v.path)],
    }
    if not groups[group]:
        raise ConfigError(
            f"model.trainable={group} leaves nothing to train in {backbone.name}; take another"
            " group"
        )
    return groups[group]
