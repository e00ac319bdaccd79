"""A network with its weights and taps, and the backbone file that is written of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedemb.models.arrays import Model
from fedemb.models.public_backbone.card import BackboneCard, write_backbone


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


def write_built(
    built: Built, output: Path, *, name: str, architecture: str, licence: str, provenance: str
) -> BackboneCard:
    """Writes a backbone file and returns its card; see `BackboneCard` for the arguments."""
    network = built.network
    layers = {tap: network.get_layer(layer) for tap, layer in built.taps.items()}
    shapes = {tap: tuple(layer.output.shape) for tap, layer in layers.items()}
    pooling = {2: "none", 3: "first_token", 4: "average"}
    fields = {
        "name": name,
        "architecture": architecture,
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
                "pooling": pooling[len(shape)],
            }
            for tap, shape in shapes.items()
        ],
        "parameters": network.count_params(),
        "licence": licence,
        "licence_text": built.licence_text,
        "provenance": provenance,
        "source": built.source,
        "source_sha256": built.source_sha256,
    }
    return write_backbone(network, output, fields)
