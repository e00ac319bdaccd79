"""Makes a backbone of a Keras network: folded, flat, with one vector of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fedemb.config import PretrainingConfig
from fedemb.errors import ArtifactError, ConfigError
from fedemb.foundation.digests import file_digest
from fedemb.models.arrays import Model
from fedemb.models.imported import check_import, known_pixels
from fedemb.models.loading import load_model, require_finite
from fedemb.models.public_backbone.card import BackboneCard, write_backbone
from fedemb.models.public_backbone.folding import applied, maker, without_batch_norm
from fedemb.models.public_backbone.pixels import BY_KIND, OURS, Pixels, image_input


@dataclass(frozen=True)
class Built:
    """A network with its weights, and what is known of them."""

    network: Model
    """`keras.Model`: images `x / 128 - 1` to features."""
    taps: dict[str, str]
    """Layer of each tap, by name."""
    trained_pixels: str
    licence_text: str
    source: str
    """File or package of the weights."""
    source_sha256: str


def write_built(built: Built, output: Path, fields: Mapping[str, object]) -> BackboneCard:
    """Writes a backbone file and returns its card.

    Args:
      built: the network.
      output: file to write.
      fields: name, architecture, licence and provenance of the card.
    """
    network = built.network
    shapes = {tap: network.get_layer(layer).output.shape for tap, layer in built.taps.items()}
    found = {
        "image_size": network.input_shape[1],
        "channels": network.input_shape[3],
        "pixels": "-1..1",
        "trained_pixels": built.trained_pixels,
        "features": network.output_shape[-1],
        "taps": [
            {
                "name": tap,
                "layer": built.taps[tap],
                "features": shape[-1],
                "pooling": "none" if len(shape) == 2 else "average",
            }
            for tap, shape in shapes.items()
        ],
        "parameters": network.count_params(),
        "licence_text": built.licence_text,
        "source": built.source,
        "source_sha256": built.source_sha256,
    }
    return write_backbone(network, output, {**fields, **found})


def of_network(
    network: Model,
    pixels: Pixels,
    source: str,
    sha256: str,
    *,
    taps: Mapping[str, str] | None = None,
    licence_text: str = "",
) -> Built:
    """Returns a backbone that computes what a network computes, on pixels `x / 128 - 1`.

    Args:
      network: `keras.Model` of one image.
      pixels: pixel values that it was trained on.
      source: file or package of the weights.
      sha256: digest of the weights.
      taps: layer of each tap by name; None: only the features.
      licence_text: text that came with the weights.

    Raises:
      ArtifactError: a weight is not finite, or the network has not one square image as input and
        one vector or map of features as output.
      ConfigError: its batch normalisation cannot be folded.
    """
    import keras

    require_finite(network)
    shape, ends = network.input_shape, network.output_shape
    if len(shape) != 4 or shape[1] != shape[2] or shape[1] is None or len(ends) not in (2, 4):
        raise ArtifactError(
            f"{source} maps {shape} to {ends}, and a backbone maps square images of a fixed size "
            "to one vector. Save it with a fixed input_shape"
        )
    if shape[3] != len(pixels.mean):
        pixels = Pixels(pixels.mean[: shape[3]], pixels.deviation[: shape[3]])
    inputs, x = image_input(shape[1], pixels)
    outputs = applied(without_batch_norm(network), x)
    if len(ends) == 4:
        outputs = keras.layers.GlobalAveragePooling2D(name="pooled_features")(outputs)
    backbone = keras.Model(inputs, outputs, name=network.name)
    taps = taps or {"head": maker(outputs).name}
    return Built(backbone, dict(taps), str(pixels), licence_text, source, sha256)


def of_file(path: Path, pixels: str | None) -> Built:
    """Returns the backbone of a `.keras` file, folded; see `of_network`.

    Args:
      path: the file.
      pixels: name of the pixel values, as `pretraining.import_pixels`; None: as the file states.

    Raises:
      InputError: the file does not exist.
      ArtifactError: the file is damaged or has layers that are not allowed.
      ConfigError: the pixel values are not known.
    """
    check_import(path, "projection")
    known = known_pixels(path)
    kind = pixels or (known[0] if known else None)
    if kind not in BY_KIND:
        kinds = ", ".join(get_args(PretrainingConfig.model_fields["import_pixels"].annotation))
        raise ConfigError(
            f"{path.name} does not state which pixel values it was trained on. Pass --pixels with "
            f"one of {kinds}"
        )
    of_ours = pixels is None and known is not None and known[1].endswith(("package", "card"))
    values = OURS if of_ours else BY_KIND[kind]
    return of_network(load_model(path), values, path.name, file_digest(path))
