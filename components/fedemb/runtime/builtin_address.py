"""Paths of the generated images; imports no image library, which the light image lacks."""

from __future__ import annotations

from pathlib import Path

from fedemb.config import BuiltinData
from fedemb.foundation.canonical_json import json_digest


def builtin_files(builtin: BuiltinData, image_size: int, parent: Path) -> tuple[Path, Path]:
    """Returns the paths of the private and the public file below a folder of runs."""
    digest = json_digest({**builtin.model_dump(), "size": image_size})[:12]
    folder = parent / "builtin-data" / digest
    return folder / "private.parquet", folder / "public.parquet"


def is_builtin_address(uri: str, builtin: BuiltinData, image_size: int) -> bool:
    """Returns whether a local path is the one of the private generated images of these settings."""
    wanted, _ = builtin_files(builtin, image_size, Path())
    return "://" not in uri and Path(uri).parts[-len(wanted.parts) :] == wanted.parts
