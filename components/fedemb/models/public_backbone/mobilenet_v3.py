"""MobileNetV3-Large from a state dict in timm's naming (arXiv 1905.02244)."""

from __future__ import annotations

from collections.abc import Mapping

from fedemb.models.arrays import Model, Node
from fedemb.models.public_backbone.builder import Array, Builder
from fedemb.models.public_backbone.pixels import Pixels, image_input

_STAGES = (
    (1, 1, "relu"),
    (2, 2, "relu"),
    (3, 2, "relu"),
    (4, 2, "hard_silu"),
    (2, 1, "hard_silu"),
    (3, 2, "hard_silu"),
)
"""Blocks, stride of the first block, activation. Kernels and channels are those of the tensors."""


def mobilenetv3_large(
    tensors: Mapping[str, Array], size: int, file: str, pixels: Pixels
) -> tuple[Model, dict[str, str]]:
    """Builds MobileNetV3-Large without its classifier.

    Args:
      tensors: state dict.
      size: height and width of the input images.
      file: name of the file, for errors.
      pixels: pixel values that the weights were trained on.

    Returns:
      `keras.Model` that maps images to 1,280 features, and the layer of each tap.

    Raises:
      ArtifactError: a tensor is missing, of another shape, or not finite.
    """
    import keras

    build = Builder(tensors, file)
    inputs, x = image_input(size, pixels)
    x = build.convolution(x, "stem_conv", "conv_stem", "bn1", 2, 1)
    x = _activated(x, "stem", "hard_silu")
    for stage, (blocks, stride, activation) in enumerate(_STAGES):
        for block in range(blocks):
            name, source = f"block{stage + 1}_{block + 1}", f"blocks.{stage}.{block}"
            x = _block(build, x, name, source, stride if block == 0 else 1, activation)
    x = build.convolution(x, "last_conv", "blocks.6.0.conv", "blocks.6.0.bn1", 1, 0)
    x = _activated(x, "last", "hard_silu")
    x = keras.layers.GlobalAveragePooling2D(keepdims=True, name="pool")(x)
    x = build.convolution(x, "head_conv", "conv_head", None, 1, 0)
    outputs = keras.layers.Flatten(name="features")(_activated(x, "head", "hard_silu"))
    taps = {"head": "features", "last_block": "last_hard_silu", "stage6": "block6_3_add"}
    return build.finished(inputs, outputs, "mobilenetv3_large", ["classifier."]), taps


def _activated(x: Node, name: str, activation: str) -> Node:
    import keras

    return keras.layers.Activation(activation, name=f"{name}_{activation}")(x)


def _block(  # noqa: PLR0917 - the shape of a block, as every paper lists it
    build: Builder, x: Node, name: str, source: str, stride: int, activation: str
) -> Node:
    """Adds an inverted residual block, or a depthwise one where nothing is expanded."""
    import keras

    shortcut, expands = x, build.has(f"{source}.conv_pwl.weight")
    norms = [f"{source}.bn{number}" for number in (1, 2, 3)]
    if expands:
        x = build.convolution(x, f"{name}_expand", f"{source}.conv_pw", norms.pop(0), 1, 0)
        x = _activated(x, f"{name}_expand", activation)
    half = build.kernel_size(f"{source}.conv_dw") // 2
    x = build.convolution(
        *(x, f"{name}_depthwise", f"{source}.conv_dw", norms[0], stride, half), depthwise=True
    )
    x = _activated(x, f"{name}_depthwise", activation)
    if build.has(f"{source}.se.conv_reduce.weight"):
        x = _excited(build, x, f"{name}_squeeze", f"{source}.se")
    last = "conv_pwl" if expands else "conv_pw"
    x = build.convolution(x, f"{name}_project", f"{source}.{last}", norms[1], 1, 0)
    if stride == 1 and shortcut.shape[-1] == x.shape[-1]:
        x = keras.layers.Add(name=f"{name}_add")([x, shortcut])
    return x


def _excited(build: Builder, x: Node, name: str, source: str) -> Node:
    """Multiplies each channel by a factor of the image."""
    import keras

    y = keras.layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}_pool")(x)
    y = build.convolution(y, f"{name}_reduce", f"{source}.conv_reduce", None, 1, 0)
    y = _activated(y, f"{name}_reduce", "relu")
    y = build.convolution(y, f"{name}_expand", f"{source}.conv_expand", None, 1, 0)
    y = _activated(y, f"{name}_expand", "hard_sigmoid")
    return keras.layers.Multiply(name=f"{name}_scale")([x, y])
