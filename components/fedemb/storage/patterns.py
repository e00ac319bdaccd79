"""Splits an address of files into a literal folder and a rest that may be a pattern.

Existing names are literal: an existing folder `photos [2024]` is that folder. Only a part that does
not exist is a pattern of `*`, `?` and `[...]`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

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
            prefix = self.rest[: min(self.rest.index(c) for c in _WILDCARDS & set(self.rest))]
            for entry in store.entries(prefix):
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
