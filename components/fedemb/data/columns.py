"""Guesses the role of each column of a source by its name; the data owner confirms the guess."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from fedemb.config import SourceConfig
from fedemb.config.data import format_of
from fedemb.data.image_files import KNOWN_ENDINGS, ImageFiles, is_side_file
from fedemb.data.photos import BadImageError
from fedemb.data.source_parts import find_files
from fedemb.data.tables import Part, check_columns, csv_columns, open_csv, open_parquet, path_values
from fedemb.errors import InputError
from fedemb.foundation.addresses import split_address
from fedemb.storage import open_store

_ROWS = 5
"""Number of names that are looked up."""
_FOLDERS = 100
"""Maximum number of folders that are tried."""
_USUAL = ("images", "train_images", "train", "photos", "img")
"""Folders that are tried in a bucket, whose folders are not listed."""


def image_root_of(part: Part, column: str) -> str:
    """Returns the folder of the CSV, or the folder next to it that has its first images.

    Args:
      part: the CSV file.
      column: name of the column with the names of the images.

    Raises:
      InputError: the file is damaged, or has no such column.
      StorageError: the folder cannot be read.
    """
    with open_csv(part, [column]) as table:
        first = next(iter(table), None)
        cells = first.slice(0, _ROWS).column(column).to_pylist() if first is not None else []
    names = [cell.decode(errors="ignore").strip() for cell in cells if cell]
    for root in _candidates(part):
        files = ImageFiles(root)
        for name in names:
            with suppress(BadImageError):
                files.read(name)
                return root
    return part.root


def _candidates(part: Part) -> Iterator[str]:
    yield part.root
    stem = PurePosixPath(part.name).stem
    local = open_store(part.root).local_root
    folders = [stem, f"{stem}_images", *_USUAL]
    if local is not None:
        with os.scandir(local) as entries:
            there = {e.name for e in entries if e.is_dir() and not e.name.startswith(".")}
        folders = [*(name for name in folders if name in there), *sorted(there)]
    for name in islice(dict.fromkeys(folders), _FOLDERS):
        yield f"{part.root.rstrip('/')}/{name}"


_USER = (
    "user_id",
    "user",
    "owner",
    "owner_id",
    "author",
    "writer",
    "person",
    "account",
    "identity",
)
_LABEL = ("label", "class", "category", "character", "target")
_IMAGE = ("image", "photo", "picture", "img", "jpg", "png", "bytes")
_FILE = ("image_id", "file", "filename", "file_name", "path", "image", "photo")
_TABLES_OF_FOLDERS = ("metadata.csv", "metadata.jsonl")
"""Tables with owners and classes in Hugging Face image folders, one per split."""
_LOOKED_AT = 200
NO_OWNER = "none"
"""Placeholder for a missing owner column: each image is a unit of privacy."""


def guess_source(
    uri: str,
    named: Mapping[str, str],
    kind: str | None = None,
    image_root: str | None = None,
    *,
    owned: bool = True,
) -> SourceConfig:
    """Returns a source with columns guessed from their names; classes are assumed to be shared.

    Args:
      uri: Parquet, CSV or TFRecord file, folder of users, or glob of files.
      named: role -> column name, for known columns; `user_id` may be `NO_OWNER`.
      kind: format of the files; None: from the ending of the address, or of the files of a folder.
      image_root: folder of the images of a CSV; None: the one that has its first images.
      owned: whether a table must have a column of owners; public photos need none.

    Raises:
      InputError: no files found, no column looks like an image or its owner, or `image_root` is
        set for another format than CSV.
      StorageError: the source cannot be read.
    """
    split_address(uri)
    said = kind or format_of_files(uri)
    kind = said or format_of(uri)
    tree: dict[str, Any] = {"uri": uri, "label_scope": "global"}
    if said:
        tree["format"] = said
    if image_root and kind != "csv":
        raise InputError(
            f"--image-root is {image_root}, and {uri} is not a CSV. Remove the option; only a CSV "
            "names images of another folder."
        )
    columns: dict[str, str | None] = {}
    if kind in ("csv", "parquet"):
        tree |= _guess_table(uri, named, kind, image_root, owned)
        columns = tree["columns"]
    elif kind == "image_folder":
        tree["format"] = kind
        names = names_in_folder(uri)
        _check_no_table(uri, names)
        depths = {name.count("/") for name in names if not is_side_file(name)}
        columns["label"] = "label" if depths == {2} else None  # user/class/photo.jpg
    tree["columns"] = _with_named(columns, named)
    return SourceConfig.model_validate(tree)


def _guess_table(
    uri: str, named: Mapping[str, str], kind: str, image_root: str | None, owned: bool
) -> dict[str, Any]:
    """Returns columns, and image root or class names, of CSV or Parquet files."""
    tree: dict[str, Any] = {}
    files, names = find_files(uri, kind), column_names(uri, kind)
    image, known = ("image_id", _FILE) if kind == "csv" else ("image", _IMAGE)
    columns: dict[str, str | None] = {"label": _first(names, _LABEL)}
    for what, guesses, needed in ((image, known, True), ("user_id", _USER, owned)):
        found = named.get(what) or _first(names, guesses)
        columns[what] = _needed(names, guesses, what, uri) if needed and not found else found
    if image_root:
        tree["image_root"] = image_root
    # Names in files of several folders are relative to the folder of each file.
    elif kind == "csv" and not any("/" in file.name for file in files):
        tree["image_root"] = image_root_of(files[0], columns["image_id"] or "")
    final = _with_named(columns, named)
    check_columns(files[0].title, names, [name for name in final.values() if name])
    if kind == "parquet" and (label := final.get("label")):
        with open_parquet(files[0]) as file:
            tree["label_names"] = _class_names(file.schema_arrow.metadata or {}, label)
    return {**tree, "columns": columns}


def column_names(uri: str, kind: str) -> list[str]:
    """Returns the columns of CSV or Parquet files; raises as `guess_source`."""
    first = find_files(uri, kind)[0]
    if kind == "csv":
        return csv_columns(first)
    with open_parquet(first) as file:
        return [*file.schema_arrow.names, *path_values(first.name)]


def _with_named(
    columns: Mapping[str, str | None], named: Mapping[str, str]
) -> dict[str, str | None]:
    """Returns guessed columns with those that the owner named; no user column for `NO_OWNER`."""
    found = {**columns, **named}
    return found | ({"user_id": None} if found.get("user_id") == NO_OWNER else {})


def names_in_folder(uri: str) -> list[str]:
    """Returns the names of the files of a folder of photos.

    Raises:
      InputError: no such folder, or a file of an unknown format.
      StorageError: the folder cannot be read.
    """
    store = open_store(uri)
    if store.local_root is not None and not store.local_root.is_dir():
        if store.local_root.exists():
            raise InputError(
                f"The format of {uri} is unknown. Unpack archives, and pass a folder of photos, "
                "Parquet, CSV or TFRecord; pass --format if the names of tables do not show it."
            )
        raise InputError(f"No folder at {uri}. Pass a file or folder of photos.")
    return store.list()


def format_of_files(uri: str) -> str | None:
    """Returns the format of the tables in a folder without photos, whatever else it holds."""
    if format_of(uri) != "image_folder":
        return None
    store = open_store(uri)
    if store.local_root is not None and not store.local_root.is_dir():
        return None
    names = [entry.name for entry in islice(store.entries(), _LOOKED_AT)]
    kinds = {format_of(name) for name in names} & {"parquet", "tfrecord"}
    if len(kinds) != 1 or any(name.lower().endswith(KNOWN_ENDINGS) for name in names):
        return None
    return kinds.pop()


def _class_names(metadata: Mapping[bytes, bytes], label: str) -> tuple[str, ...]:
    """Returns the class names of a column from the Hugging Face metadata of a Parquet file."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        names = features[label]["names"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if texts else ()


def _check_no_table(uri: str, names: Sequence[str]) -> None:
    """Refuses a folder with a table of its photos, because its folders need not be users."""
    tables: list[str] = []
    for name in names:
        folder, _, last = name.rpartition("/")
        table = format_of(last) != "image_folder"
        if (table and not folder) or (last in _TABLES_OF_FOLDERS and "/" not in folder):
            tables.append(name)
    if tables:
        lines = any(name.endswith(".jsonl") for name in tables)
        raise InputError(
            f"{uri} has {' and '.join(tables[:2])}, which may name the owners of its photos. Pass "
            "the one that does (CSV, Parquet or TFRecord), or remove it if each folder is one "
            "user." + " Convert JSON Lines to CSV first." * lines
        )


def guess_image_column(uri: str) -> str:
    """Returns the photo column of Parquet files; raises as `guess_source`."""
    return _needed(column_names(uri, "parquet"), _IMAGE, "image", uri)


def _first(names: Sequence[str], known: Sequence[str]) -> str | None:
    folded = {re.sub(r"[\s_-]+", "_", name.strip().lower()): name for name in names}
    return next((folded[name] for name in known if name in folded), None)


def _needed(names: Sequence[str], known: Sequence[str], what: str, uri: str) -> str:
    found = _first(names, known)
    if found is None and len(names) == 1 and (apart := re.search(r"[;\t|]", names[0])):
        raise InputError(
            f"{uri} has one column, {names[0]!r}, separated by {apart[0]!r}; save it with commas"
        )
    if found is None:
        alone = "; if no user owns several images, pass --task classification --column "
        alone += f"{what}={NO_OWNER}, which makes each a unit of privacy"
        raise InputError(
            f"no column of {uri} is named like {what} ({', '.join(known)}), it has "
            f"{', '.join(map(repr, sorted(names)))}; name it with --column {what}=NAME"
            + alone
            * (what == "user_id")
        )
    return found
