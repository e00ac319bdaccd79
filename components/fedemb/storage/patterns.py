"""Splits an address of files into a folder that is named and a rest that may be a pattern.

What exists is taken as it is spelled: a folder `photos [2024]` is a folder. Only a part that does
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
    """Where files are."""

    root: str
    """Address of the folder, without a pattern."""
    rest: str
    """Name below it: of a file or folder, or a pattern; empty: all of the folder."""
    pattern: bool

    def entries(self) -> Iterator[Entry]:
        """The files, in the order of their names, which are relative to the root."""
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
    """Where on this machine an address is; None: in a bucket."""
    if "://" in uri and not uri.startswith("file://"):
        return None
    path = Path(uri if "://" not in uri else unquote(uri.removeprefix("file://")))
    return path.expanduser().absolute()


def locate(uri: str) -> Located:
    """Splits an address; a bucket is asked only for parts that look like a pattern.

    Raises:
      InputError: the address is not one of a store.
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
