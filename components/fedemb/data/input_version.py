"""Addresses of sources, their patterns, and the version of the private input.

Existing names are literal: an existing folder `photos [2024]` is that folder. Only a part that does
not exist is a pattern of `*`, `?` and `[...]`.

A reservation binds address and version, and partition_users checks them. The fingerprint reads only
names, sizes and the object versions of the store, never image bytes. It is a keyed commitment,
because sizes and checksums of private files would let the adversary of the privacy definition
distinguish two data sets. It includes the run ID, because equal commitments of two runs would
reveal that no data changed between them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import commit_to
from fedemb.storage import Entry, open_store

_WILDCARDS = frozenset("*?[")


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
            for entry in store.entries(re.split(r"[*?\[]", self.rest, maxsplit=1)[0]):
                if fnmatch.fnmatchcase(entry.name, self.rest):
                    yield entry
            return
        for entry in store.entries(self.rest):
            if not self.rest or entry.name == self.rest or entry.name.startswith(f"{self.rest}/"):
                yield entry


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
        if _WILDCARDS & set(part) and not exists(here):
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
