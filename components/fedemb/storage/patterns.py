"""Splits an address of files into a literal folder and a rest that may be a pattern.

Existing names are literal: an existing folder `photos [2024]` is that folder. Only a part that does
not exist is a pattern of `*`, `?`, `[...]`, `{000..009}` and `{a,b}`. Braces name each file, and a
file that is missing is an error.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from fedemb.errors import InputError
from fedemb.storage import Entry, open_store

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
