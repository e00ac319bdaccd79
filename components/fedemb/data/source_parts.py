"""Lists the files, row groups and folders of a source, and fails if something is missing.

Reads only names and schemas, never data. A missing file, a missing column, a truncated file or a
missing permission is an infrastructure fault, reported in one sentence before anything runs.
`find_parts` runs in the driver and lists files. Workers use `split_part` to list the parts whose
number grows with the users: one folder per user, or the row groups of a file. For files in a
bucket, the driver opens only the first file, and workers open all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING

from fedemb.config import SourceConfig
from fedemb.config.data import ENDINGS
from fedemb.data.image_files import is_side_file
from fedemb.data.input_version import locate
from fedemb.data.tables import Part, check_columns, csv_columns, open_parquet, path_values
from fedemb.errors import InputError
from fedemb.storage import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

FOLDERS_PER_PART = 64


def find_parts(source: SourceConfig, columns: Sequence[str]) -> list[Part]:
    """Lists the parts of a source, and checks that they can be read.

    Args:
      source: the source.
      columns: names that must exist, besides the image; columns of `where` are added.

    Returns:
      Parts, sorted by name.

    Raises:
      InputError: no files found, a column is missing, or a file is damaged.
      StorageError: no permission, no credentials, no network.
    """
    kind = source.file_format
    wanted = list(dict.fromkeys([*columns, *source.where]))
    if kind == "image_folder":
        return _find_folders(source, wanted)
    files = find_files(source.uri, kind)
    if kind == "csv":
        _check_image_root(source)
        wanted.append(source.columns.image_id)
    for part in files if open_store(files[0].root).local_root is not None else files[:1]:
        if kind == "parquet":
            with open_parquet(part) as file:
                check_parquet(part, file.schema_arrow, source, wanted)
        elif kind == "csv":
            check_columns(part.title, csv_columns(part), wanted, header=False)
    return files


def split_part(part: Part) -> Iterator[Part]:
    """Yields smaller parts that workers can read separately, without reading data.

    Raises:
      InputError: the file is damaged.
      StorageError: the file can no longer be read.
    """
    store = open_store(part.root)
    if not part.name and not part.folders:
        for folders in _batches(_folders(store)):
            yield replace(part, folders=folders)
    elif ENDINGS["parquet"].search(part.name) and store.local_root is not None:
        with open_parquet(part) as file:
            groups = file.metadata.num_row_groups
        yield from (replace(part, row_group=group) for group in range(groups))
    else:  # one download per file in a bucket, not one per row group
        yield part


def _batches(folders: Iterable[str]) -> Iterator[tuple[str, ...]]:
    rest = iter(folders)
    while batch := tuple(islice(rest, FOLDERS_PER_PART)):
        yield batch


def loose_files(source: SourceConfig) -> int:
    """Returns the number of photos that are not inside a user's folder."""
    if source.file_format != "image_folder":
        return 0
    store = open_store(source.uri)
    if store.local_root is None:
        names = (entry.name for entry in store.entries() if "/" not in entry.name)
    else:
        files = (entry for entry in os.scandir(store.local_root) if entry.is_file())
        names = (entry.name for entry in files if not entry.name.startswith("."))
    return sum(not is_side_file(name) for name in names)


def _folders(store: Store) -> Iterator[str]:
    """Yields the names of the top folders of a store, in any order, one page at a time."""
    if store.local_root is None:
        names = (entry.name for entry in store.entries() if "/" in entry.name)
        yield from (folder for folder, _ in groupby(names, lambda name: name.split("/")[0]))
        return
    with os.scandir(store.local_root) as entries:
        for entry in entries:
            # A link would count its user twice, or a person from outside the store.
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield entry.name


def find_files(uri: str, kind: str) -> list[Part]:
    """Returns the files at an address, sorted by name: a file, a folder or a glob.

    An existing name is used literally, see `fedemb.data.source_parts`.
    """
    place = locate(uri)
    store = open_store(place.root)
    if not place.pattern and place.rest and store.exists(place.rest):
        return [Part(store.uri, place.rest, title=place.rest)]
    names = [entry.name for entry in place.entries()]
    if not place.pattern:
        names = [name for name in names if ENDINGS[kind].search(name)]
    if not names:
        raise InputError(
            f"No {kind} file at {uri}. Check data.source.uri (or pretraining.source.uri)."
        )
    places = [f"file {n} of {len(names)} of {uri} (by name)" for n in range(1, len(names) + 1)]
    return [
        Part(store.uri, name, title=place)
        for name, place in zip(sorted(names), places, strict=True)
    ]


def _find_folders(source: SourceConfig, wanted: Sequence[str]) -> list[Part]:
    known = [name for name in (source.columns.user_id, source.columns.label) if name]
    check_columns("an image folder", known, wanted)
    store = open_store(source.uri)
    if store.local_root is not None and not store.local_root.is_dir():
        raise InputError(f"No folder at {source.uri}. Check data.source.uri and data.source.format")
    if next(_folders(store), None) is None:
        raise InputError(
            f"{source.uri} has no folder per user. Put the photos into one folder per person, or "
            "pass a table (CSV or Parquet) with the columns image and user_id."
        )
    return [Part(store.uri, "")]


def csv_image_root(source: SourceConfig) -> str:
    """Returns the image root of a CSV source; by default the folder of the CSV file."""
    return source.image_root or find_files(source.uri, "csv")[0].root


def _check_image_root(source: SourceConfig) -> None:
    root = csv_image_root(source)
    store = open_store(root)
    if store.local_root is not None and not store.local_root.is_dir():
        raise InputError(f"No folder at {root}. Check data.source.image_root.")


def check_parquet(
    part: Part, schema: pa.Schema, source: SourceConfig, wanted: Sequence[str]
) -> None:
    """Raises InputError unless a Parquet file has all columns, of types that can be read."""
    import pyarrow as pa

    image = source.columns.image
    of_path = [name for name in path_values(part.name) if name not in schema.names]
    check_columns(part.title, [*schema.names, *of_path], [image, *wanted])
    kind = schema.field(image).type if image in schema.names else pa.string()
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    # A shard without rows may have columns of no type.
    is_a = pa.types
    known = (is_a.is_binary, is_a.is_large_binary, is_a.is_binary_view, is_a.is_null)
    if not any(is_known(kind) for is_known in known):
        raise InputError(
            f"column {image!r} of {part.title} holds {kind}, expected encoded image bytes; name "
            "the right one in data.source.columns.image"
        )
    for name in wanted:
        kind = schema.field(name).type if name in schema.names else pa.string()
        if pa.types.is_nested(kind):
            raise InputError(
                f"Column {name!r} of {part.title} holds {kind}, which is several values. Name a "
                "column of text or whole numbers in data.source.columns."
            )
