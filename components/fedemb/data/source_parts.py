"""Splits an address of files into a literal folder and a rest that may be a pattern.

Existing names are literal: an existing folder `photos [2024]` is that folder. Only a part that does
not exist is a pattern of `*`, `?`, `[...]`, `{000..009}` and `{a,b}`. Braces name each file, and a
file that is missing is an error.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from fedemb.config import SourceConfig
from fedemb.config.data import ENDINGS
from fedemb.data.image_files import is_side_file
from fedemb.data.tables import Part, check_columns, csv_columns, open_parquet, path_values
from fedemb.errors import InputError
from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import commit_to
from fedemb.storage import Entry, Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa

_WILDCARDS = frozenset("*?[")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{},]*(?:,[^{},]*)+)\}", re.ASCII)
_MOST_NAMES = 100_000
"""Maximum number of names from the braces of an address."""


@dataclass(frozen=True)
class Located:
    """The location of files."""

    root: str
    """Address of the folder, without a pattern."""
    rest: str
    """Name of a file or folder below the root, or a pattern; empty for the whole folder."""
    pattern: bool

    def entries(self) -> Iterator[Entry]:
        """Yields the files, ordered by their names, which are relative to the root."""
        store = open_store(self.root)
        if self.pattern:
            names = braces(self.rest)
            prefix = re.split(r"[*?\[{]", self.rest, maxsplit=1)[0]
            literal = {name for name in names if not _WILDCARDS & set(name)}
            patterns = [name for name in names if name not in literal]
            for entry in store.entries(prefix):
                if entry.name in literal or any(
                    fnmatch.fnmatchcase(entry.name, pattern) for pattern in patterns
                ):
                    yield entry
            return
        for entry in store.entries(self.rest):
            if not self.rest or entry.name == self.rest or entry.name.startswith(f"{self.rest}/"):
                yield entry

    def missing(self, found: Collection[str]) -> list[str]:
        """Returns the names and patterns of the braces that none of the found files has."""
        names = braces(self.rest) if self.pattern and _BRACES.search(self.rest) else ()
        return [
            name
            for name in names
            if name not in found and not (_WILDCARDS & set(name) and fnmatch.filter(found, name))
        ]


def braces(text: str) -> tuple[str, ...]:
    """Returns the names from an address with braces.

    Raises:
      InputError: more than 100,000 names.

    >>> braces("a-{08..10}.tar"), braces("{x,y}/*")
    (('a-08.tar', 'a-09.tar', 'a-10.tar'), ('x/*', 'y/*'))
    """
    pieces: list[list[str]] = []
    end, count = 0, 1
    for match in _BRACES.finditer(text):
        first, last, listed = match.groups()
        numbers = range(int(first[:18]), int(last[:18]) + 1) if first else range(0)
        count *= len(numbers) if first else len(listed.split(","))
        if not 0 < count <= _MOST_NAMES:
            raise InputError(
                f"{match[0]} has {count:,} names, expected 1 to {_MOST_NAMES:,}. Correct "
                "the numbers in the braces."
            )
        named = [str(n).zfill(len(first)) for n in numbers] if first else listed.split(",")
        pieces += [[text[end : match.start()]], named]
        end = match.end()
    return tuple(map("".join, itertools.product(*pieces, [text[end:]])))


def local_path(uri: str) -> Path | None:
    """Returns the local path of an address; None for a bucket."""
    if "://" in uri and not uri.startswith("file://"):
        return None
    path = Path(uri if "://" not in uri else unquote(uri.removeprefix("file://")))
    return path.expanduser().absolute()


def locate(uri: str) -> Located:
    """Splits an address; a bucket is listed only for parts that contain pattern characters.

    Raises:
      InputError: the address is not a valid store address.
      StorageError: the bucket cannot be listed.
    """
    path = local_path(uri)
    if path is not None:
        return _split("/", path.parts[1:], lambda folder: Path(folder).exists())
    scheme, _, below = uri.partition("://")
    bucket, *parts = below.rstrip("/").split("/")
    return _split(f"{scheme}://{bucket}", parts, _in_bucket)


def _split(top: str, parts: list[str] | tuple[str, ...], exists: Callable[[str], bool]) -> Located:
    known = top
    for number, part in enumerate(parts):
        here = f"{known.rstrip('/')}/{part}"
        if (_WILDCARDS & set(part) or _BRACES.search(part)) and not exists(here):
            return Located(known, "/".join(parts[number:]), pattern=True)
        if number == len(parts) - 1:
            return Located(known, part, pattern=False)
        known = here
    return Located(known, "", pattern=False)


def _in_bucket(address: str) -> bool:
    parent, _, name = address.rpartition("/")
    store = open_store(parent)
    return any(
        entry.name == name or entry.name.startswith(f"{name}/") for entry in store.entries(name)
    )


def fingerprint_input(uri: str, key: bytes, run_id: str) -> str:
    """Returns a commitment to the current files at an address.

    For objects in a bucket, the name, size and version (MD5, ETag or generation) are bound, so
    other content is another version. For local files, only name and size are bound: a copy of the
    same files must not invalidate a reservation, and the trainer binds the data before round 0. For
    a CSV source, the mapping is bound, but not the image files that it names.

    Args:
      uri: `data.source.uri`; a file, folder or glob; local, gs:// or s3://.
      key: the policy's commitment key.
      run_id: name of the run.

    Returns:
      `<uri>#<commitment>`; only the address if it has no files.

    Raises:
      StorageError: the store cannot be listed.
    """
    listing = hashlib.sha256()
    found = False
    for entry in _entries(uri):
        found = True
        name = entry.name.encode(errors="backslashreplace").decode()  # may be invalid Unicode
        listing.update(canonical_json([name, entry.size, entry.version]) + b"\n")
    if not found:
        return uri
    return f"{uri}#{commit_to(key, canonical_json(['input/1', run_id, listing.hexdigest()]))}"


def _entries(uri: str) -> Iterator[Entry]:
    """Yields the files at an address, in order, named below the last folder without wildcards."""
    path = local_path(uri)
    if path is not None and path.is_file():
        yield Entry(path.name, path.stat().st_size, "")
    elif path is not None and path.is_dir():
        yield from open_store(path).entries()
    else:
        yield from locate(uri).entries()


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
            check_columns(part.said, csv_columns(part), wanted, header=False)
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
        return [Part(store.uri, place.rest, said=place.rest)]
    names = [entry.name for entry in place.entries()]
    if absent := place.missing(set(names)):
        raise InputError(
            f"{len(absent):,} files that the braces of {uri} name are missing, the first is "
            f"{absent[0]}. Copy the missing files, or correct the numbers in the braces."
        )
    if not place.pattern:
        names = [name for name in names if ENDINGS[kind].search(name)]
    if not names:
        raise InputError(
            f"No {kind} file at {uri}. Check data.source.uri (or pretraining.source.uri)."
        )
    places = [f"file {n} of {len(names)} of {uri} (by name)" for n in range(1, len(names) + 1)]
    return [
        Part(store.uri, name, said=place) for name, place in zip(sorted(names), places, strict=True)
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
    check_columns(part.said, [*schema.names, *of_path], [image, *wanted])
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
            f"column {image!r} of {part.said} holds {kind}, expected encoded image bytes; name the "
            "right one in data.source.columns.image"
        )
    for name in wanted:
        kind = schema.field(name).type if name in schema.names else pa.string()
        if pa.types.is_nested(kind):
            raise InputError(
                f"Column {name!r} of {part.said} holds {kind}, which is several values. Name a "
                "column of text or whole numbers in data.source.columns."
            )
