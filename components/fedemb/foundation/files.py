"""Reads files from untrusted sources, and writes output files. All file output uses this module.

An output is a regular file or a new name. A device, a pipe, a socket or a symbolic link at its name
is an error: a rename would replace /dev/null for all users, and a link can point anywhere. The
umask of the process applies; without a umask, other accounts may read an output but not write it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO

from fedemb.errors import FedEmbError, InputError, StorageError

_WRONG_PATH = frozenset(
    (errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP)
)
"""Errors of a path that a retry cannot fix."""
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS))
"""Errors of a file system without hard links; a missing permission is EACCES."""
_READABLE = 0o644
"""Mode of an output file before the umask."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20
MOST_TEXT = 16 << 20
"""Maximum bytes of a configuration, schedule, profile, trust file or key."""


class AppendedFile:
    """Bytes that threads append to an unbuffered file, and read by their position."""

    def __init__(self, file: FileIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def append(self, data: bytes) -> int:
        """Returns the position of appended bytes.

        Raises:
          StorageError: the disk is full.
        """
        with self._lock:  # the position after an append belongs to it
            try:
                written = self._file.write(data)
            except OSError:
                written = 0
            if written != len(data):
                raise StorageError("the temporary folder is full; free space there (TMPDIR)")
            return self._file.tell() - len(data)

    def read(self, start: int, length: int) -> bytes:
        """Returns appended bytes.

        Raises:
          StorageError: the file was cut meanwhile.
        """
        data = os.pread(self._file.fileno(), length, start)
        if len(data) != length:
            raise StorageError("a file in the temporary folder was cut meanwhile; run again")
        return data


def write_error(what: str, path: Path, error: OSError) -> FedEmbError:
    """Returns the error to raise if a file cannot be written: wrong path, or a fixable fault.

    Its message starts with `what`, for example "could not write model.json".
    """
    why = f"{what}: {error.strerror or error}"
    if error.errno in _WRONG_PATH:
        return InputError(f"{why}; {path} cannot be a file of ours, name another path")
    return StorageError(f"{why}; free space or fix permissions of {path.parent}, then run again")


def require_output(path: Path) -> None:
    """Refuses an output path that is neither a regular file nor a new name.

    A folder is accepted, because the rename to its name fails without a change.

    Raises:
      InputError: the path is a device, a pipe, a socket or a symbolic link.
    """
    try:
        _require_regular_or_new(path)
    except OSError as error:
        raise write_error(f"could not write {path.name}", path, error) from error


def _require_regular_or_new(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.EINVAL, "it is a symbolic link, and outputs do not follow links")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")


def make_folder(path: Path) -> None:
    """Creates a folder and its parents; other accounts never get write access to it."""
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            folder.mkdir(mode=0o755, exist_ok=True)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, "a file is at the path of a folder")


@contextmanager
def _new_temporary(path: Path, mode: int) -> Generator[tuple[Path, BinaryIO]]:
    """Yields a new hidden file next to `path`, with `mode` less the umask; removed on exit."""
    try:
        make_folder(path.parent)
    except FileExistsError as error:  # not the name of the output
        raise NotADirectoryError(errno.ENOTDIR, "a file is at the path of a folder") from error
    _require_regular_or_new(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, _NEW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO]:
    """Yields a file to write to; it appears at `path` complete if the block ends without an error.

    Raises:
      InputError: the path cannot be an output file, see `require_output`.
      StorageError: the disk is full or the folder is not writable; nothing is left behind.
    """
    try:
        with _new_temporary(path, _READABLE) as (temporary, file):
            yield file
            _finish(file)
            temporary.replace(path)
    except OSError as error:
        raise write_error(f"could not write {path.name}", path, error) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file atomically (temporary name, fsync, rename).

    Raises:
      InputError: the path cannot be an output file, see `require_output`.
      StorageError: the disk is full or the folder is not writable; nothing is left behind.
    """
    with new_file(path) as file:
        file.write(data)


def create_bytes(path: Path, data: bytes, mode: int = _READABLE) -> None:
    """Creates a file atomically; fails if the name exists (hard link of a temporary file).

    Raises:
      FileExistsError: another process created the name first.
      InputError: the path cannot be an output file.
      StorageError: the disk is full or the folder is not writable.
    """
    if path.is_symlink():
        raise FileExistsError(errno.EEXIST, "the name exists", str(path))
    try:
        with _new_temporary(path, mode) as (temporary, file):
            file.write(data)
            _finish(file)
            _link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise write_error(f"could not create {path.name}", path, error) from error


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise InputError(
                f"could not create {path.name}: the file system of {path.parent} has no hard "
                "links, by which a name is given once; name a folder on another one"
            ) from error
        raise


def open_log(path: Path) -> BinaryIO:
    """Opens a log for appending; only the owner may read it.

    Raises:
      InputError: the path cannot be an output file, see `require_output`.
      StorageError: no permission to write.
    """
    try:
        _require_regular_or_new(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(path, flags, 0o600), "ab")
    except OSError as error:
        raise write_error(f"could not write {path.name}", path, error) from error


def require_folder(path: Path, what: str) -> None:
    """Refuses a path that cannot be a folder, because the path or one of its parents is a file.

    `what` describes the folder in the message, such as "the key store".

    Raises:
      InputError: the path cannot be a folder.
    """
    for place in (path, *path.parents):
        with suppress(OSError):  # a folder without permission is reported at the first write
            if place.exists():
                if place.is_dir():
                    return
                raise InputError(
                    f"{place} is a file, and {what} {path} is to be a folder; name another"
                )


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of a killed writer from a folder that has only one writer."""
    for path in folder.glob(".*"):
        path.unlink()


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading; never blocks on a pipe without a writer.

    Raises:
      OSError: as `open`; EINVAL for a device, a pipe or a socket.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_at_most(file: BinaryIO, limit: int) -> bytes | None:
    """Returns the bytes of an open file; None, without reading all, if it has more than `limit`.

    The size from the file system is checked first, so that a large sparse file is not read.
    """
    if os.fstat(file.fileno()).st_size > limit:
        return None
    data = bytearray()
    while chunk := file.read(min(_CHUNK, limit + 1 - len(data))):
        data += chunk
        if len(data) > limit:
            return None
    return bytes(data)


def read_regular(path: Path, limit: int = MOST_TEXT) -> bytes:
    """Returns the bytes of a regular file from an untrusted source, such as a configuration.

    Raises:
      OSError: as `open_regular`; EFBIG if the file has more than `limit` bytes.
    """
    with open_regular(path) as file:
        data = read_at_most(file, limit)
    if data is None:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes")
    return data
