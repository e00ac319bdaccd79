"""Loads and saves finished backbones."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from fedemb.config import ModelConfig
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.foundation.files import write_bytes
from fedemb.models.arrays import Model
from fedemb.models.backbones import check_backbone
from fedemb.models.mirror_image import mirror_layer
from fedemb.models.scattering import scattering_layer
from fedemb.models.standardized import gain_convolution, standardized_convolution
from fedemb.models.whitened import whitened_layer

_LAYERS = (
    standardized_convolution,
    gain_convolution,
    mirror_layer,
    scattering_layer,
    whitened_layer,
)


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
