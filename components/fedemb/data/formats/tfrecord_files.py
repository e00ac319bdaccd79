"""Reads TFRecord files of tf.train.Example."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from fedemb.data.formats.parts import Part, as_file
from fedemb.errors import InputError
from fedemb.foundation.files import open_regular

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LARGEST_RECORD = 1 << 30
"""Maximum bytes of one record."""


def _masked(data: bytes) -> int:
    """Returns the masked checksum of a TFRecord."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class _Inflated(io.RawIOBase):
    """ZLIB stream that is read forwards."""

    def __init__(self, file: BinaryIO):
        self._file, self._inflate, self._left = file, zlib.decompressobj(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        data, target = b"", memoryview(buffer)
        while not data and not self._inflate.eof:
            packed = self._left or self._file.read(1 << 16)
            if not packed:
                raise EOFError
            data = self._inflate.decompress(packed, len(target))
            self._left = self._inflate.unconsumed_tail
        target[: len(data)] = data
        return len(data)


@contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    """Yields a TFRecord file decompressed, independent of its name."""
    with open_regular(path) as file:
        head = file.read(12)
        file.seek(0)
        # The length of a first record may start with the bytes of GZIP: its checksum decides.
        plain = len(head) == 12 and _masked(head[:8]) == int.from_bytes(head[8:], "little")
        if not plain and head[:2] == b"\x1f\x8b":
            yield cast("BinaryIO", gzip.GzipFile(fileobj=file))
        elif not plain and head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0:
            yield cast("BinaryIO", io.BufferedReader(_Inflated(file)))
        else:
            yield file


def iter_tfrecord(part: Part) -> Iterator[bytes]:
    """Yields the records of a TFRecord file with verified checksums; detects GZIP and ZLIB.

    Raises:
      InputError: the file is truncated or damaged.
    """
    with as_file(part) as path:
        try:
            with _unpacked(path) as file:
                while head := file.read(12):
                    length = int.from_bytes(head[:8], "little")
                    if len(head) < 12 or _masked(head[:8]) != int.from_bytes(head[8:], "little"):
                        raise EOFError
                    if length > LARGEST_RECORD:  # before allocating that memory
                        raise InputError(
                            f"{part.said} has a record of {length:,} bytes, more than "
                            f"{LARGEST_RECORD:,}; write smaller records"
                        )
                    record = file.read(length)
                    crc = file.read(4)
                    if len(record) < length or _masked(record) != int.from_bytes(crc, "little"):
                        raise EOFError
                    yield record
        except (FileNotFoundError, PermissionError):
            raise
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{part.said} is not a whole TFRecord file (cut or damaged); copy it again"
            ) from error
