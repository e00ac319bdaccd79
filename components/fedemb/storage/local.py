"""A folder as a store: temporary file, fsync, then rename (write) or hard link (create)."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from fedemb.errors import InputError, StorageError
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import (
    create_bytes,
    make_folder,
    new_file,
    open_regular,
    read_at_most,
    write_bytes,
)
from fedemb.storage.base import Entry, Store, check_name, visible


class LocalStore(Store):
    """Files below one folder; names are visible POSIX relative paths."""

    def __init__(self, root: Path) -> None:
        """Stores the folder path; the first write creates the folder."""
        self._root = root
        self.local_root = root
        self.uri = root.as_posix()

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """Returns a file of limited size; see `Store.read_up_to`."""
        with self._sentences("read"), open_regular(self._path(name)) as file:
            return read_at_most(file, limit)

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file by rename; see `Store.write`."""
        with self._sentences("written"):
            write_bytes(self._output(name), data)
            _sync_folder(self._path(name).parent)

    def create(self, name: str, data: bytes) -> None:
        """Links a finished file to a name that must be unused; see `Store.create`."""
        with self._sentences("written"):
            create_bytes(self._output(name), data)
            _sync_folder(self._path(name).parent)

    def exists(self, name: str) -> bool:
        """Returns whether the file exists."""
        with self._sentences("read"):
            return self._path(name).is_file()

    def list(self, prefix: str = "") -> list[str]:
        """Returns all visible names that start with `prefix`, sorted; a missing folder is empty."""
        folder = prefix.rpartition("/")[0]
        if folder and not visible(folder):
            return []
        top = self._root / folder  # other programs may have created invalid names here
        if not top.is_dir():
            return []
        with self._sentences("listed"):
            return sorted(self._names(top, prefix))

    def _names(self, top: Path, prefix: str) -> Iterator[str]:
        """Yields visible files below `top` with the prefix; skips folders that cannot match."""
        for parent, folders, files in os.walk(top, onerror=_raise):
            below = f"{Path(parent).relative_to(self._root).as_posix()}/".removeprefix("./")
            folders[:] = [each for each in folders if _leads(f"{below}{each}/", prefix)]
            for file in files:
                name = f"{below}{file}"
                if name.startswith(prefix) and visible(name) and Path(parent, file).is_file():
                    yield name  # excludes pipes, sockets and devices

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields visible files with their sizes; see `Store.entries`."""
        with self._sentences("listed"):
            for name in self.list(prefix):
                yield Entry(name, (self._root / name).stat().st_size, "")

    def delete(self, name: str) -> None:
        """Deletes the file; a missing file is not an error."""
        with self._sentences("deleted"):
            self._path(name).unlink(missing_ok=True)

    def digest(self, name: str) -> str | None:
        """Returns the SHA-256 of the file; None if missing."""
        with self._sentences("read"):
            path = self._path(name)
            return file_digest(path) if path.is_file() else None

    def clock(self) -> datetime | None:
        """Returns the time of the file system: of its server, if it is a network file system."""
        if not self._root.is_dir():
            return None
        with self._sentences("written"), tempfile.TemporaryFile(dir=self._root) as file:
            return datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, UTC)

    def upload_tree(self, local: Path, prefix: str) -> dict[str, str]:
        """See `Store.upload_tree`; a new tree appears in one rename and needs no index."""
        if local.is_dir() and not self._path(prefix).exists():
            with suppress(FileExistsError):  # another writer created it meanwhile
                return self._rename_in(local, prefix)
        return super().upload_tree(local, prefix)

    def create_tree(self, local: Path, prefix: str) -> None:
        """See `Store.create_tree`; one rename to a name that must be unused."""
        if self._path(prefix).exists():
            raise FileExistsError(f"{prefix} exists already in {self.uri}")
        self._rename_in(local, prefix)

    def tree_name(self, prefix: str, digests: dict[str, str]) -> str:
        """Returns `prefix` itself; see `Store.tree_name`."""
        return prefix

    def _rename_in(self, local: Path, prefix: str) -> dict[str, str]:
        target = self._output(prefix)
        with self._sentences("written"):
            make_folder(target.parent)
            with tempfile.TemporaryDirectory(
                prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
            ) as temporary:
                staged = Path(temporary, "tree")
                staged.mkdir(mode=0o755)
                digests = LocalStore(staged.parent).upload_tree(local, "tree")
                try:
                    staged.rename(target)
                except OSError as error:  # rename does not replace a folder with files
                    if error.errno == errno.ENOTEMPTY:
                        raise FileExistsError(f"{prefix} exists in {self.uri}") from error
                    raise
            _sync_folder(target.parent)
        return digests

    def _index(self, prefix: str) -> dict[str, str] | None:
        return None

    def _write_index(self, prefix: str, digests: dict[str, str]) -> None:
        """Does nothing: the rename makes a local tree complete."""

    def _upload(self, local: Path, name: str, digest: str) -> None:
        with (
            self._sentences("written"),
            local.open("rb") as source,
            new_file(self._output(name)) as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)

    def _download(self, name: str, local: Path) -> None:
        with self._sentences("read"):
            shutil.copyfile(self._path(name), local)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _output(self, name: str) -> Path:
        """Returns the path to write an object to; rejects folders that link out of the store."""
        path = self._path(name)
        if not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise InputError(
                f"the store {self.uri} has a symbolic link that leads out of it where a folder is "
                "needed; remove the link"
            )
        return path

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, FileNotFoundError):
            raise
        except (IsADirectoryError, NotADirectoryError) as error:
            if what == "read":
                raise FileNotFoundError(error.errno, "no such object in the store") from error
            raise InputError(
                f"Store {self.uri} has a file where a folder is needed, or the reverse. Remove it."
            ) from error
        except OSError as error:
            raise StorageError(
                f"the store {self.uri} could not be {what}: {error.strerror}; fix permissions or "
                "free space, then run again"
            ) from error


def _leads(folder: str, prefix: str) -> bool:
    """Returns whether a folder, `a/b/`, may contain visible names that start with `prefix`."""
    return visible(folder[:-1]) and (folder.startswith(prefix) or prefix.startswith(folder))


def _raise(error: OSError) -> None:
    raise error


def _sync_folder(folder: Path) -> None:
    """Syncs the folder, so that a new name survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
