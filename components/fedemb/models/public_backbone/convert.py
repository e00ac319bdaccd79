"""Converts files of weights of other ecosystems, in timm's naming, to backbones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedemb.errors import ConfigError
from fedemb.foundation.digests import file_digest
from fedemb.models.arrays import Model
from fedemb.models.public_backbone.builder import Array
from fedemb.models.public_backbone.built import Built
from fedemb.models.public_backbone.convnext import convnext_tiny
from fedemb.models.public_backbone.mobilenet_v3 import mobilenetv3_large
from fedemb.models.public_backbone.pixels import BY_KIND, Pixels
from fedemb.models.public_backbone.resnet import resnet50
from fedemb.models.public_backbone.safetensors_file import read_safetensors
from fedemb.models.public_backbone.torch_file import read_torch
from fedemb.models.public_backbone.vision_transformer import vision_transformer

_Network = tuple[Model, dict[str, str]]
_Build = Callable[[Mapping[str, Array], int, str, Pixels], _Network]


@dataclass(frozen=True)
class Architecture:
    """A network whose weights can be converted."""

    description: str
    size: int
    """Height and width of the input images, unless others are named."""
    pixels: str
    """Pixel values that the weights were usually trained on."""
    build: _Build


def _vit_small(tensors: Mapping[str, Array], size: int, file: str, pixels: Pixels) -> _Network:
    return vision_transformer(tensors, size, file, "vit_small", 16, pixels)


def _dinov2_small(tensors: Mapping[str, Array], size: int, file: str, pixels: Pixels) -> _Network:
    return vision_transformer(tensors, size, file, "dinov2_small", 14, pixels)


ARCHITECTURES: dict[str, Architecture] = {
    "resnet50": Architecture("ResNet-50", 224, "imagenet", resnet50),
    "mobilenetv3_large": Architecture("MobileNetV3-Large", 224, "imagenet", mobilenetv3_large),
    "convnext_tiny": Architecture("ConvNeXt-T", 224, "imagenet", convnext_tiny),
    "vit_small": Architecture("ViT-S/16, class token", 224, "-1..1", _vit_small),
    "dinov2_small": Architecture("DINOv2 ViT-S/14, class token", 224, "imagenet", _dinov2_small),
}
"""Architectures by name."""


def convert_tensors(path: Path, architecture: str, size: int | None, pixels: str | None) -> Built:
    """Returns the backbone of a safetensors file or a PyTorch state dict.

    Args:
      path: `.safetensors`, `.pth`, `.pt` or `.bin` file.
      architecture: name in `ARCHITECTURES`.
      size: height and width of the input images; None: the usual ones.
      pixels: pixel values of the training, as `pretraining.import_pixels`; None: the usual ones.

    Raises:
      InputError: the file does not exist or is too large.
      ArtifactError: the file is damaged or of another architecture.
      ConfigError: the architecture or the pixel values are unknown, or the size does not fit.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ConfigError(
            f"--architecture is {architecture!r}. Pass one of {', '.join(ARCHITECTURES)}"
        )
    kind = pixels or known.pixels
    if kind not in BY_KIND:
        raise ConfigError(f"--pixels is {kind!r}. Pass one of {', '.join(BY_KIND)}")
    values = BY_KIND[kind]
    read = read_safetensors if path.suffix == ".safetensors" else read_torch
    network, taps = known.build(read(path), size or known.size, path.name, values)
    return Built(network, taps, str(values), "", path.name, file_digest(path))
