"""ViT-S/16 and DINOv2-S/14 from state dicts in timm's naming (arXiv 2010.11929, 2304.07193)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedemb.errors import ArtifactError, ConfigError
from fedemb.models.arrays import Model, Node
from fedemb.models.public_backbone.builder import Array, Builder
from fedemb.models.public_backbone.pixels import Pixels, image_input
from fedemb.models.scaled import first_token_layer, scaled_layers, token_layer

_BLOCKS, _HEADS = 12, 6
_UNUSED = ("head.", "mask_token", "norm_pre.")


def vision_transformer(  # noqa: PLR0917 - name and input of a network
    tensors: Mapping[str, Array], size: int, file: str, name: str, patch: int, pixels: Pixels
) -> tuple[Model, dict[str, str]]:
    """Builds a small vision transformer that returns its class token.

    Args:
      tensors: state dict; one with layer scale is DINOv2's.
      size: height and width of the input images, a multiple of the patch.
      file: name of the file, for errors.
      name: name of the network.
      patch: height and width of a patch.
      pixels: pixel values that the weights were trained on.

    Returns:
      `keras.Model` that maps images to 384 features, and the layer of each tap.

    Raises:
      ConfigError: the patch does not divide the size.
      ArtifactError: a tensor is missing, of another shape, or not finite.
    """
    import keras

    if size % patch:
        raise ConfigError(
            f"--size is {size}, and {name} reads patches of {patch} pixels. Pass a multiple of "
            f"{patch}, such as --size {max(1, size // patch) * patch}"
        )
    build = Builder(tensors, file)
    inputs, x = image_input(size, pixels)
    kernel = build.take("patch_embed.proj.weight", None, x.shape[-1], patch, patch)
    width = kernel.shape[0]
    embed = keras.layers.Conv2D(width, patch, patch, name="stem_patches")
    x = build.add(
        embed, x, kernel.transpose(2, 3, 1, 0), build.take("patch_embed.proj.bias", width)
    )
    side = size // patch
    x = keras.layers.Reshape((side * side, width), name="stem_rows")(x)
    token = build.take("cls_token", 1, 1, width)
    positions = _positions(build.take("pos_embed", 1, None, width), side, file)
    x = build.add(token_layer()(name="stem_token"), x, token, positions)
    for block in range(_BLOCKS):
        x = _block(build, x, f"block{block + 1}", f"blocks.{block}")
    x = build.layer_norm(x, "last_norm", "norm")
    outputs = first_token_layer()(name="pool")(x)
    taps = {"head": "pool", "last_block": f"block{_BLOCKS}_add2", "stage11": "block11_add2"}
    return build.finished(inputs, outputs, name, _UNUSED), taps


def _positions(found: Array, side: int, file: str) -> Array:
    """Returns position embeddings of a class token and `side * side` patches.

    Those of another size are interpolated bicubically, as in timm.
    """
    old = math.isqrt(found.shape[1] - 1)
    if old * old != found.shape[1] - 1:
        raise ArtifactError(
            f"tensor 'pos_embed' of {file} has {found.shape[1]} positions, expected a square and "
            "one. Check --architecture"
        )
    if old == side:
        return found
    grid = found[0, 1:].reshape(old, old, -1)
    matrix = _bicubic(old, side)
    grid = np.einsum("ai,bj,ijc->abc", matrix, matrix, grid).reshape(1, side * side, -1)
    return np.concatenate([found[:, :1], grid], axis=1)


def _bicubic(old: int, new: int) -> Array:
    """Returns the matrix of antialiased bicubic interpolation in one direction, `[new, old]`."""
    scale = old / new
    support = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    reach = (np.arange(old)[None] + 0.5 - centres[:, None]) / support
    x, a = np.abs(reach), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return weights / weights.sum(1, keepdims=True)


def _block(build: Builder, x: Node, name: str, source: str) -> Node:
    """Adds attention between the positions of one image, and two dense layers at each."""
    import keras

    y = build.layer_norm(x, f"{name}_norm1", f"{source}.norm1")
    y = _scaled(build, _attention(build, y, name, f"{source}.attn"), f"{name}_scale1", source, 1)
    x = keras.layers.Add(name=f"{name}_add1")([x, y])
    y = build.layer_norm(x, f"{name}_norm2", f"{source}.norm2")
    y = build.dense(y, f"{name}_dense1", f"{source}.mlp.fc1")
    y = keras.layers.Activation("gelu", name=f"{name}_gelu")(y)
    y = build.dense(y, f"{name}_dense2", f"{source}.mlp.fc2")
    y = _scaled(build, y, f"{name}_scale2", source, 2)
    return keras.layers.Add(name=f"{name}_add2")([x, y])


def _scaled(build: Builder, x: Node, name: str, source: str, number: int) -> Node:
    """Multiplies each channel by its factor, if the state dict has one."""
    width, gamma = x.shape[-1], f"{source}.ls{number}.gamma"
    if not build.has(gamma):
        return x
    return build.add(
        scaled_layers()["LayerScale"](1.0, width, name=name), x, build.take(gamma, width)
    )


def _attention(build: Builder, x: Node, name: str, source: str) -> Node:
    import keras

    width = x.shape[-1]
    depth = width // _HEADS
    kernel = build.take(f"{source}.qkv.weight", 3 * width, width)
    bias = build.take(f"{source}.qkv.bias", 3 * width)
    kernels = kernel.reshape(3, _HEADS, depth, width).transpose(0, 3, 1, 2)
    biases = bias.reshape(3, _HEADS, depth)
    output = build.take(f"{source}.proj.weight", width, width).T.reshape(_HEADS, depth, width)
    attention = keras.layers.MultiHeadAttention(_HEADS, depth, name=f"{name}_attention")
    return build.set(
        attention,
        attention(x, x),
        *(one for pair in zip(kernels, biases, strict=True) for one in pair),
        *(output, build.take(f"{source}.proj.bias", width)),
    )
