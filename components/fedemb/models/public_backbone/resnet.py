"""ResNet-50 from a state dict in timm's or torchvision's naming (arXiv 1512.03385)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedemb.models.arrays import Model, Node
from fedemb.models.public_backbone.builder import Builder
from fedemb.models.public_backbone.pixels import Pixels, image_input

_BLOCKS = (3, 4, 6, 3)


def resnet50(
    tensors: Mapping[str, np.ndarray], size: int, file: str, pixels: Pixels
) -> tuple[Model, dict[str, str]]:
    """Builds ResNet-50 without its classifier.

    Args:
      tensors: state dict.
      size: height and width of the input images.
      file: name of the file, for errors.
      pixels: pixel values that the weights were trained on.

    Returns:
      `keras.Model` that maps images to 2,048 features, and the layer of each tap.

    Raises:
      ArtifactError: a tensor is missing, of another shape, or not finite.
    """
    import keras

    build = Builder(tensors, file)
    inputs, x = image_input(size, pixels)
    x = build.convolution(x, "stem_conv", "conv1", "bn1", 2, 3)
    x = keras.layers.ReLU(name="stem_relu")(x)
    # After ReLU, rows of zeros and of minus infinity have the same maximum.
    x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)
    for stage, blocks in enumerate(_BLOCKS, start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            x = _bottleneck(build, x, f"stage{stage}_{block + 1}", f"layer{stage}.{block}", stride)
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    taps = {"head": "pool", "last_block": "stage4_3_relu2", "stage3": "stage3_6_relu"}
    return build.finished(inputs, outputs, "resnet50", ["fc."]), taps


def _bottleneck(build: Builder, x: Node, name: str, source: str, stride: int) -> Node:
    import keras

    shortcut = x
    if build.has(f"{source}.downsample.0.weight"):
        shortcut = build.convolution(
            *(x, f"{name}_shortcut_conv", f"{source}.downsample.0", f"{source}.downsample.1"),
            *(stride, 0),
        )
    x = build.convolution(x, f"{name}_conv1", f"{source}.conv1", f"{source}.bn1", 1, 0)
    x = keras.layers.ReLU(name=f"{name}_relu1")(x)
    x = build.convolution(x, f"{name}_conv2", f"{source}.conv2", f"{source}.bn2", stride, 1)
    x = keras.layers.ReLU(name=f"{name}_relu2")(x)
    x = build.convolution(x, f"{name}_conv3", f"{source}.conv3", f"{source}.bn3", 1, 0)
    x = keras.layers.Add(name=f"{name}_add")([x, shortcut])
    return keras.layers.ReLU(name=f"{name}_relu")(x)
