"""Reads tar files (ustar, GNU, pax; plain or GZIP) from start to end, without extracting them.

No name is used as a path, so a name such as `../x` reaches no file. Memory is bounded by the
largest member that the caller asks for.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemb.data.formats.parts import Part, as_file
from fedemb.errors import InputError
from fedemb.foundation.files import open_regular

BLOCK = 512
LARGEST_HEADER = 1 << 20
"""Maximum bytes of an extended header, which holds a long name."""
_END = bytes(BLOCK)
_OTHER_PACKERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK": "zip"}
_CHUNK = 1 << 20
_EXTENDED = (b"x", b"g", b"L", b"K")
_KINDS = {b"0": "file", b"\0": "file", b"7": "file", b"5": "folder"}
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Type flags of links, devices, folders and pipes."""
_BASE_256 = 0x80
"""First byte of a number that octal digits cannot hold."""
_LARGEST = 1 << 63


class _DamagedError(Exception):
    """The file ends early, or a header is not valid."""


@dataclass(frozen=True)
class Member:
    """One entry of a tar file."""

    name: str | None
    """Path in the archive; None if it is not UTF-8."""
    kind: str
    """`file`, `folder`, or `other`: a link, a device or a sparse file, which is not read."""
    size: int
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
            yield from _members(file, wanted)
            while rest := file.read(_CHUNK):
                if rest.strip(b"\0"):
                    raise InputError(
                        f"{part.said} has data after its end, such as a second archive. Write one "
                        "archive per file."
                    )
        except (FileNotFoundError, PermissionError):
            raise
        except (_DamagedError, OSError, EOFError, ValueError, zlib.error) as error:
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


def _members(file: Any, wanted: Callable[[str, int], bool]) -> Iterator[Member]:
    extended: dict[str, bytes] = {}
    while (block := _exactly(file, BLOCK)) != _END:
        name, flag, size = _header(block)
        if flag in _EXTENDED:
            if size > LARGEST_HEADER:
                raise _DamagedError
            extended |= _attributes(flag, _content(file, size))
            continue
        raw, size = extended.get("path", name), int(extended.get("size", size))
        more = flag == b"S" and block[482]  # further blocks of the map of a sparse file
        while more:
            more = _exactly(file, BLOCK)[504]
        sparse = any(key.startswith("GNU.sparse") for key in extended)
        extended = {}
        text = _text(raw)
        kind = "other" if sparse or flag not in _KINDS else _KINDS[flag]
        if kind == "file" and raw.endswith(b"/"):  # a folder in the oldest format
            kind = "folder"
        if flag in _WITHOUT_CONTENT:
            size = 0
        if kind == "file" and text is not None and wanted(text, size):
            yield Member(text, kind, size, _content(file, size))
        else:
            _skip(file, size)
            yield Member(text, kind, size)


def _header(block: bytes) -> tuple[bytes, bytes, int]:
    """Returns the raw name, the type flag and the size of a header block."""
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if _number(block[148:156]) != total:
        raise _DamagedError
    name, flag, prefix = block[:100], block[156:157], block[345:500]
    name, prefix = name.partition(b"\0")[0], prefix.partition(b"\0")[0]
    if prefix and block[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    return name, flag, _number(block[124:136])


def _number(field: bytes) -> int:
    """Returns a number in octal digits, or in base 256 for large ones."""
    number = (
        int.from_bytes(field[1:], "big")
        if field[0] == _BASE_256
        else int(field.strip(b" \0") or b"0", 8)
    )
    if not 0 <= number < _LARGEST:
        raise _DamagedError
    return number


def _attributes(flag: bytes, data: bytes) -> dict[str, bytes]:
    """Returns what an extended header says of the next member."""
    if flag == b"L":
        return {"path": data.rstrip(b"\0")}
    found: dict[str, bytes] = {}
    while flag == b"x" and data:
        length = int(data.partition(b" ")[0])
        line, data = data[:length], data[length:]
        key, sign, value = line.partition(b" ")[2].partition(b"=")
        if not sign or not value.endswith(b"\n"):
            raise _DamagedError
        found[key.decode(errors="replace")] = value[:-1]
    if "size" in found and not (found["size"].isdigit() and int(found["size"]) < _LARGEST):
        raise _DamagedError
    return found


def _exactly(file: Any, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise _DamagedError
    return data


def _content(file: Any, size: int) -> bytes:
    """Returns the content of a member, and reads on to the next block."""
    data = _exactly(file, size)
    _exactly(file, -size % BLOCK)
    return data


def _skip(file: Any, size: int) -> None:
    rest = size + -size % BLOCK
    while rest:
        rest -= len(_exactly(file, min(rest, _CHUNK)))


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
