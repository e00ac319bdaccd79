"""A released model for its users: photo files in, embeddings out, from the bundle only.

`PARITY` contains photos in every encoding, and the embedding that training computed for each. An
installation that decodes photos differently from training, by another library or version, is
detected before it is used.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from fedemb.config import RunConfig
from fedemb.data.hostile_photos import hostile_photos
from fedemb.data.photos import PhotoReader
from fedemb.data.pixels import canonical_image, decode_pngs
from fedemb.documents.utility import embedding_space_id
from fedemb.errors import ArtifactError, Refused
from fedemb.foundation.canonical_json import canonical_json, file_digest, sha256_hex
from fedemb.foundation.files import write_bytes
from fedemb.models.inference import classify, embed
from fedemb.models.loading import load_backbone
from fedemb.serving.bundle import PARITY

_REMEDY = "Install the versions in requirements/"
_FURTHEST = 0.02
"""Maximum distance between two embeddings of one photo, of unit length. Another decoder version may
round differently; a rotated or tinted photo is ten times as far."""
_BATCH = 64


class ReleasedModel:
    """A bundle, its configuration and its network.

    The network is built from the configuration and the weights of `backbone.keras`, without custom
    code. The SavedModel is for other servers: its graph can read and write files, so it is never
    executed here.
    """

    def __init__(self, bundle: Path):
        """Opens a verified bundle.

        Raises:
          ArtifactError: the bundle has no model, or the model cannot be loaded.
        """
        file = bundle / "backbone.keras"
        try:
            self.config = RunConfig.model_validate(
                json.loads((bundle / "config.json").read_bytes())
            )
            self.space_id = embedding_space_id(file_digest(file), self.config.model)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"the model of {bundle} cannot be loaded ({type(error).__name__}); use a bundle "
                "that release_model published"
            ) from error
        self.backbone = load_backbone(file, self.config.model)
        self.bundle = bundle
        self.reader = PhotoReader.of(self.config.model, self.config.data.max_pixels)

    def embed(
        self, images: UInt8[np.ndarray, "images size size channels"]
    ) -> Float32[np.ndarray, "images dim"]:
        """Returns the outputs for pixels: rows of unit length, or a classifier's probabilities."""
        if self.config.model.classes:
            temperature = self.config.model.temperature
            return classify(self.backbone, images, _BATCH, temperature=temperature)
        return embed(self.backbone, images, _BATCH)

    def check_parity(self) -> None:
        """Checks that this installation decodes and embeds photos as training did.

        Raises:
          Refused: results differ; the message names the encoding.
          ArtifactError: the bundle has no data to compare with.
        """
        require_parity(self.bundle / PARITY, self.reader.read, self.embed)


def write_parity(
    path: Path, compute: Callable[[np.ndarray], np.ndarray], reader: PhotoReader
) -> None:
    """Writes photos in every encoding with the embeddings that training and evaluation compute."""
    photos = list(hostile_photos())
    stored = [canonical_image(photo.data, reader)[1] for photo in photos]
    pixels = decode_pngs(stored, reader.image_size, reader.channels)
    embeddings = compute(pixels)
    lines = [
        {
            "name": photo.name,
            "file": base64.b64encode(photo.data).decode(),
            "pixels_sha256": sha256_hex(image.tobytes()),
            "embedding": [round(float(value), 6) for value in row],
        }
        for photo, image, row in zip(photos, pixels, embeddings, strict=True)
    ]
    write_bytes(path, canonical_json(lines))


def require_parity(
    path: Path,
    read: Callable[[bytes], np.ndarray],
    embedder: Callable[[np.ndarray], np.ndarray],
    *,
    exact: bool = False,
) -> None:
    """Reads and embeds the photos of a parity file, and compares the results with the file.

    Args:
      path: file written by `write_parity`.
      read: bytes to uint8 [size, size, channels].
      embedder: uint8 [images, size, size, channels] to rows of unit length.
      exact: whether every pixel must match too, as on the machine that wrote the file.

    Raises:
      Refused: a photo cannot be read, or its pixels or embedding differ.
      ArtifactError: the file is missing or damaged.
    """
    try:
        lines: Sequence[Mapping[str, Any]] = json.loads(path.read_bytes())
        names = [line["name"] for line in lines]
        files = [base64.b64decode(line["file"]) for line in lines]
        wanted_pixels = {line["name"]: line["pixels_sha256"] for line in lines}
        wanted = np.array([line["embedding"] for line in lines], np.float32)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path.name} cannot be read; fetch the bundle again") from error
    if not names:
        raise ArtifactError(f"{path.name} holds no photo; fetch the bundle again")
    pixels = []
    for name, data in zip(names, files, strict=True):
        try:
            pixels.append(read(data))
        except Exception as error:
            raise Refused(f"test photo {name} cannot be decoded ({error}). {_REMEDY}") from error
        if exact and sha256_hex(pixels[-1].tobytes()) != wanted_pixels[name]:
            raise Refused(f"test photo {name} has other pixels than in training. {_REMEDY}")
    distance = np.linalg.norm(embedder(np.stack(pixels)) - wanted, axis=1)
    worst = int(np.argmax(np.where(np.isfinite(distance), distance, np.inf)))
    if not distance[worst] <= _FURTHEST:
        raise Refused(
            f"the embedding of test photo {names[worst]} is {distance[worst]:.3f} from that of "
            f"training, expected at most {_FURTHEST}. {_REMEDY}"
        )
