"""Files of backbones: loading, saving, and the card of a public backbone."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, StringConstraints

from fedemb.config import ModelConfig
from fedemb.errors import ArtifactError, InputError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.foundation.document import Document, Part, parse, written
from fedemb.foundation.files import open_regular, write_bytes
from fedemb.models.backbones import check_backbone
from fedemb.models.keras_backend import Model
from fedemb.models.layers import mirror_layer, standardized_convolution, whitened_layer
from fedemb.models.scattering import scattering_layer

_LAYERS = (standardized_convolution, mirror_layer, scattering_layer, whitened_layer)


def load_backbone(path: Path, model: ModelConfig) -> Model:
    """Loads a `.keras` file in safe mode (no code in it runs) and checks its shape.

    Args:
      path: the file.
      model: configuration that the backbone must match.

    Raises:
      ArtifactError: missing, damaged, or it needs custom code.
      ConfigError: the backbone does not match `model`.
    """
    backbone = load_model(path)
    check_backbone(backbone, model)
    return backbone


def load_model(path: Path) -> Model:
    """Loads a `.keras` file in safe mode; see `load_backbone`.

    Raises:
      ArtifactError: missing, damaged, or it needs custom code.
    """
    import keras

    # Calling these functions registers the project's layers with Keras.
    for layer in _LAYERS:
        layer()
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
        return cast("Model", model)  # a `.keras` file holds a model
    except Exception as error:  # Keras raises many types for a broken file
        raise ArtifactError(
            f"{path.name} in {path.parent.name} cannot be loaded ({type(error).__name__}); run the "
            "step that writes it again"
        ) from error


def save_backbone(backbone: Model, path: Path) -> str:
    """Writes a `.keras` file of the backbone only and returns its SHA-256.

    The same weights give the same bytes: Keras's date of saving is omitted.

    Raises:
      StorageError: the file cannot be written; no partial file is left.
    """
    return write_members(path, saved_members(backbone))


def saved_members(backbone: Model) -> dict[str, bytes]:
    """Returns the members of a `.keras` file by name, without Keras's date of saving."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "backbone.keras")
        backbone.save(saved)
        with zipfile.ZipFile(saved) as source:
            members = {name: source.read(name) for name in source.namelist()}
    metadata = json.loads(members["metadata.json"])
    metadata.pop("date_saved", None)
    return {**members, "metadata.json": json.dumps(metadata, sort_keys=True).encode()}


def write_members(path: Path, members: Mapping[str, bytes]) -> str:
    """Writes a `.keras` file and returns its SHA-256; the same members give the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as target:
        for name, data in sorted(members.items()):
            target.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    write_bytes(path, packed.getvalue())
    return sha256_hex(packed.getvalue())


def require_finite(backbone: Model) -> None:
    """Rejects a public backbone with invalid weights, before any charge.

    Raises:
      ArtifactError: a weight is NaN or infinite.
    """
    import numpy as np

    for variable in backbone.weights:
        if not np.isfinite(np.asarray(variable.numpy(), np.float64)).all():
            raise ArtifactError(
                f"{variable.path} of the public backbone holds NaN or infinite weights; import "
                "another file, or lower pretraining.learning_rate"
            )


# The card of a backbone file: architecture, input pixels, taps, licence, origin.
#
# A backbone file is a `.keras` file with an extra member, `public_backbone.json`, which Keras
# ignores. The card states the digest of the network, so it is refused in another file.


CARD = "public_backbone.json"
"""Member of the file that holds the card."""
_NETWORK = ("config.json", "model.weights.h5")
_CARD_BYTES = 1 << 20

_Sha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
_Line = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]
_Positive = Annotated[int, Field(gt=0)]


class Tap(Part):
    """Features that can be read from the network, averaged over positions."""

    name: _Name
    """Name in `model.taps`, such as `head` or `last_block`."""
    layer: _Line
    """Name of the layer whose output is read."""
    features: _Positive
    """Number of features: channels of the layer's output."""
    pooling: Literal["none", "average"]
    """Reduction to one vector for each image: none, or the mean over positions."""


class BackboneCard(Document):
    """Description of a backbone file."""

    kind: ClassVar[str] = "public_backbone"

    name: _Name
    """Name in `fedemb backbone show`, such as `efficientnet_lite0`."""
    architecture: _Line
    image_size: _Positive
    """Height and width of the input images."""
    channels: _Positive
    pixels: Literal["-1..1"]
    """Pixel range of the input, as `pretraining.import_pixels`."""
    trained_pixels: _Line
    """Pixel values `x` in 0..255 as the weights were trained on, such as `(x - 127) / 128`. The
    first layer of the file converts to them."""
    features: _Positive
    """Length of the output."""
    taps: list[Tap]
    parameters: _Positive
    """Number of weights."""
    licence: _Line
    """Licence of the weights, in one line."""
    licence_text: Annotated[str, StringConstraints(max_length=100_000)]
    """Full text that came with the weights; empty if none did."""
    provenance: _Line
    """Origin of the weights and of their training images."""
    source: _Line
    """Package and version, or name of the file, that the weights were read from."""
    source_sha256: _Sha
    """Digest of the file of weights."""
    network_sha256: _Sha
    """Digest of the network in this file: settings and weights."""


def read_card(path: Path) -> BackboneCard | None:
    """Returns the card of a `.keras` file; None if the file has no card.

    Raises:
      InputError: the file does not exist.
      ArtifactError: not a `.keras` file, or the card is malformed or of another network.
    """
    with opened(path) as archive:
        if CARD not in archive.namelist():
            return None
        card = parse(member(archive, CARD, _CARD_BYTES), BackboneCard, path.name).body
        if card.network_sha256 != _digest(lambda name: member(archive, name)):
            raise ArtifactError(
                f"the card in {path.name} describes another network. Write the file again with "
                "`fedemb backbone get`"
            )
        return card


def write_backbone(backbone: Model, path: Path, fields: Mapping[str, object]) -> BackboneCard:
    """Writes a backbone file and returns its card. The same network gives the same bytes.

    Args:
      backbone: `keras.Model`, images to features.
      path: output file.
      fields: fields of `BackboneCard` except `network_sha256`.

    Raises:
      InputError: the path cannot be an output file.
      StorageError: the file cannot be written; no partial file is left.
    """
    members = saved_members(backbone)
    card = BackboneCard.of_fields({**fields, "network_sha256": _digest(members.__getitem__)})
    write_members(path, {**members, CARD: written(card).data})
    return card


def opened(path: Path) -> zipfile.ZipFile:
    """Opens a `.keras` file; Keras packs no member, and a packed one may unfold without end.

    Raises:
      InputError: the file does not exist.
      ArtifactError: not a `.keras` file, or a member is packed.
    """
    try:
        open_regular(path).close()  # refuses a pipe, which would block
        archive = zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist. Name a .keras file") from error
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path.name} is not a .keras file. Name a .keras file") from error
    if packed := [each.filename for each in archive.infolist() if each.compress_type]:
        archive.close()
        raise ArtifactError(
            f"{path.name} holds a packed {packed[0]}, which may unfold without end. Save the "
            "backbone with Keras 3"
        )
    return archive


def member(archive: zipfile.ZipFile, name: str, limit: int | None = None) -> bytes:
    """Returns a member; refuses one that is larger than `limit`, or than its file.

    Raises:
      ArtifactError: the member is missing, damaged or too large.
    """
    path = Path(str(archive.filename))
    try:
        size = archive.getinfo(name).file_size
        if size > min(limit or size, path.stat().st_size):
            raise ArtifactError(f"{path.name} has a member {name} that is too large. Save it again")
        return archive.read(name)
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path.name} is not a .keras file: it has no readable {name}. Save it with Keras 3"
        ) from error


def _digest(read: Callable[[str], bytes]) -> str:
    """Returns the digest of the digests of the members that Keras reads."""
    return sha256_hex(b"".join(bytes.fromhex(sha256_hex(read(name))) for name in _NETWORK))
