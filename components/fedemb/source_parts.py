"""Finding what there is to read: files, row groups, folders; and failing loudly if it is not there.

Only names and schemas are looked at, never data: a missing file, a missing column, a cut file or a
lack of permission is infrastructure, and one sentence says so before anything runs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.fedemb.config import SourceConfig
from components.fedemb.errors import InputError
from components.fedemb.source_files import csv_columns, open_parquet
from components.fedemb.storage import Store, open_store

FOLDERS_PER_PART = 64


@dataclass(frozen=True)
class Part:
    """A piece of a source that one worker reads: a file, a row group, or some folders."""

    root: str
    """Address of the store."""
    name: str
    """Name of the file in the store; empty for folders."""
    row_group: int | None = None
    folders: tuple[str, ...] = ()


def source_format(source: SourceConfig) -> str:
    """The format of a source; `auto` is decided by the ending of its address."""
    if source.format != "auto":
        return source.format
    name = source.uri.lower().rstrip("/")
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    if name.endswith((".tfrecord", ".tfrecord.gz", ".tfrecords")):
        return "tfrecord"
    return "csv" if name.endswith(".csv") else "image_folder"


def find_parts(source: SourceConfig, columns: Sequence[str]) -> list[Part]:
    """Lists what there is to read, and checks that it can be read.

    Args:
      source: where.
      columns: names that must exist, besides the image; columns of `where` are added.

    Returns:
      Parts, sorted by name.

    Raises:
      InputError: nothing there, a column missing, a file damaged.
      StorageError: no permission, no credentials, no network.
    """
    kind = source_format(source)
    wanted = list(dict.fromkeys([*columns, *source.where]))
    if kind == "image_folder":
        return _find_folders(source, wanted)
    store, names = _find_files(source.uri, kind)
    if kind == "csv":
        _check_image_root(source)
        wanted.append(source.columns.image_id)
    parts = []
    for name in names:
        if kind == "parquet":
            parts += _parquet_parts(store, name, source, wanted)
            continue
        if kind == "csv":
            _check_columns(name, csv_columns(store, name), wanted)
        parts.append(Part(store.uri, name))
    return parts


def _find_files(uri: str, kind: str) -> tuple[Store, list[str]]:
    """The store and the names of the files at an address: a file, a folder or a glob."""
    if "://" not in uri:
        uri = str(Path(uri).expanduser().absolute())
    parent, _, last = uri.rstrip("/").rpartition("/")
    fixed = parent
    while any(character in fixed for character in "*?["):
        fixed, _, piece = fixed.rpartition("/")
        last = f"{piece}/{last}"
    store = open_store(fixed)
    if any(character in last for character in "*?["):
        names = [name for name in store.list() if fnmatch.fnmatchcase(name, last)]
    elif store.exists(last):
        names = [last]
    else:
        endings = {"parquet": (".parquet", ".pq"), "csv": (".csv",)}.get(kind, (".tfrecord", ".gz"))
        names = [name for name in store.list(f"{last}/") if name.endswith(endings)]
    if not names:
        raise InputError(f"there is no {kind} file at {uri}; check data.source.uri")
    return store, names


def _find_folders(source: SourceConfig, wanted: Sequence[str]) -> list[Part]:
    known = [source.columns.user_id, *([source.columns.label] if source.columns.label else [])]
    _check_columns("an image folder", known, wanted)
    store = open_store(source.uri)
    if store.local_root is not None:
        if not store.local_root.is_dir():
            raise InputError(
                f"there is no folder {source.uri}; check data.source.uri and data.source.format"
            )
        entries = store.local_root.iterdir()
        folders = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    else:
        folders = sorted({name.split("/")[0] for name in store.list() if "/" in name})
    if not folders:
        raise InputError(f"{source.uri} holds no folder per user; check data.source.uri and format")
    return [
        Part(store.uri, "", folders=tuple(folders[start : start + FOLDERS_PER_PART]))
        for start in range(0, len(folders), FOLDERS_PER_PART)
    ]


def _check_columns(name: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in found:
            raise InputError(
                f"{name} has no column {column!r}, it has {', '.join(map(repr, sorted(found)))}; "
                "name the right one in data.source.columns (or where, or partition.evaluation)"
            )


def _check_image_root(source: SourceConfig) -> None:
    if not source.image_root:
        raise InputError("a CSV source needs data.source.image_root, the folder of its images")
    store = open_store(source.image_root)
    if store.local_root is not None and not store.local_root.is_dir():
        raise InputError(f"there is no folder {source.image_root}; check data.source.image_root")


def _parquet_parts(store: Store, name: str, source: SourceConfig, wanted: list[str]) -> list[Part]:
    import pyarrow as pa

    with open_parquet(store, name) as file:
        schema = file.schema_arrow
        groups = file.metadata.num_row_groups
    image = source.columns.image
    _check_columns(name, schema.names, [image, *wanted])
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise InputError(
            f"column {image!r} of {name} holds {kind}, expected encoded image bytes; name the right"
            " one in data.source.columns.image"
        )
    if store.local_root is None:  # one download per file, not one per row group
        return [Part(store.uri, name)]
    return [Part(store.uri, name, group) for group in range(groups)]
