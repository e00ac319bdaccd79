"""Reads tar files (plain or GZIP) from start to end with `tarfile`, without extracting them.

No name is used as a path, so a name such as `../x` reaches no file. Memory is bounded by the
largest member that the caller asks for. Unlike `tarfile` alone, a file that is cut between two
members, or has a damaged header, is refused and not read as a shorter one.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from fedemb.data.formats.parts import Part, as_file
from fedemb.errors import InputError
from fedemb.foundation.files import open_regular

LARGEST_HEADER = 1 << 20
"""Maximum bytes of an extended header, which holds a long name."""
_OTHER_PACKERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip"}
_CHUNK = 1 << 20
_EXTENDED = (b"x", b"g", b"X", b"L", b"K")


class _DamagedError(Exception):
    """The file ends early, or a header is not valid."""


class _Header(tarfile.TarInfo):
    """Header of a member; `tarfile` alone takes a damaged one for the end of the file."""

    @classmethod
    @override
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            raise
        except tarfile.HeaderError as error:
            raise _DamagedError from error
        if found.size < 0 or (found.type in _EXTENDED and found.size > LARGEST_HEADER):
            raise _DamagedError
        return found


@dataclass(frozen=True)
class Member:
    """One entry of a tar file."""

    name: str | None
    """Path in the archive; None if it is not UTF-8."""
    kind: str
    """`file`, `folder`, or `other`: a link, a device or a sparse file, which is not read."""
    data: bytes | None = None
    """Content; None if it was not asked for."""


def iter_members(part: Part, wanted: Callable[[str, int], bool]) -> Iterator[Member]:
    """Yields the members of a tar file in order.

    Args:
      part: the file.
      wanted: whether to read a file, by its name and its size in bytes.

    Raises:
      InputError: the file is missing, cut or damaged, or is not a tar file.
      StorageError: no permission.
    """
    with as_file(part) as path, _unpacked(part, path) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header, encoding="utf-8") as tar:
                while found := tar.next():
                    tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                    yield _member(tar, found, wanted)
            while rest := file.read(_CHUNK):
                if rest.strip(b"\0"):
                    raise InputError(
                        f"{part.said} has data after its end, such as a second archive. Write one "
                        "archive per file."
                    )
        except (FileNotFoundError, PermissionError):
            raise
        except (
            *(_DamagedError, tarfile.TarError, OSError, EOFError, ValueError, OverflowError),
            zlib.error,
        ) as error:
            raise InputError(
                f"{part.said} is not a whole tar file (cut or damaged); copy it again"
            ) from error


@contextmanager
def _unpacked(part: Part, path: Path) -> Iterator[Any]:
    with open_regular(path) as file:
        head = file.read(6)
        file.seek(0)
        for magic, packer in _OTHER_PACKERS.items():
            if head.startswith(magic):
                raise InputError(
                    f"{part.said} is compressed with {packer}. Write a plain tar file, or one with "
                    "GZIP."
                )
        yield gzip.GzipFile(fileobj=file) if head[:2] == b"\x1f\x8b" else file


def _member(
    tar: tarfile.TarFile, found: tarfile.TarInfo, wanted: Callable[[str, int], bool]
) -> Member:
    if found.size < 0:  # by an extended header
        raise _DamagedError
    try:
        name = found.name.encode().decode()
    except UnicodeEncodeError:
        name = None
    sparse = found.issparse() or any(key.startswith("GNU.sparse") for key in found.pax_headers)
    if found.isdir() or sparse or not found.isfile():
        return Member(name, "folder" if found.isdir() else "other")
    content = tar.extractfile(found)
    if name is None or content is None or not wanted(name, found.size):
        return Member(name, "file")
    return Member(name, "file", content.read())
