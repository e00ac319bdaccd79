"""ConvNeXt-T from a state dict in timm's naming (arXiv 2201.03545)."""

from __future__ import annotations

from collections.abc import Mapping

from fedemb.models.arrays import Model, Node
from fedemb.models.public_backbone.builder import Array, Builder
from fedemb.models.public_backbone.pixels import Pixels, image_input
from fedemb.models.scaled import scaled_layers

_BLOCKS = (3, 3, 9, 3)


def convnext_tiny(
    tensors: Mapping[str, Array], size: int, file: str, pixels: Pixels
) -> tuple[Model, dict[str, str]]:
    """Builds ConvNeXt-T without its classifier.

    Args:
      tensors: state dict.
      size: height and width of the input images.
      file: name of the file, for errors.
      pixels: pixel values that the weights were trained on.

    Returns:
      `keras.Model` that maps images to 768 features, and the layer of each tap.

    Raises:
      ArtifactError: a tensor is missing, of another shape, or not finite.
    """
    import keras

    build = Builder(tensors, file)
    inputs, x = image_input(size, pixels)
    x = build.convolution(x, "stem_conv", "stem.0", stride=4, padding=0)
    x = build.layer_norm(x, "stem_norm", "stem.1")
    for stage, blocks in enumerate(_BLOCKS):
        name, source = f"stage{stage + 1}", f"stages.{stage}"
        if stage:
            x = build.layer_norm(x, f"{name}_norm", f"{source}.downsample.0")
            x = build.convolution(x, f"{name}_conv", f"{source}.downsample.1", stride=2, padding=0)
        for block in range(blocks):
            x = _block(build, x, f"{name}_{block + 1}", f"{source}.blocks.{block}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = build.layer_norm(x, "last_norm", "head.norm")
    taps = {"head": "last_norm", "last_block": "stage4_3_gelu", "stage3": "stage3_9_add"}
    return build.finished(inputs, outputs, "convnext_tiny", ["head.fc."]), taps


def _block(build: Builder, x: Node, name: str, source: str) -> Node:
    import keras

    y = build.convolution(x, f"{name}_depthwise", f"{source}.conv_dw", padding=3, depthwise=True)
    y = build.layer_norm(y, f"{name}_norm", f"{source}.norm")
    y = build.dense(y, f"{name}_dense1", f"{source}.mlp.fc1")
    y = keras.layers.Activation("gelu", name=f"{name}_gelu")(y)
    y = build.dense(y, f"{name}_dense2", f"{source}.mlp.fc2")
    width = y.shape[-1]
    scale = scaled_layers()["LayerScale"](1.0, width, name=f"{name}_scale")
    y = build.add(scale, y, build.take(f"{source}.gamma", width))
    return keras.layers.Add(name=f"{name}_add")([x, y])
