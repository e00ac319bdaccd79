"""Key store in a folder: files of mode 0600 in folders of mode 0700."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator
from pathlib import Path

from typing_extensions import override

from fedemb.errors import LedgerError, StorageError
from fedemb.foundation.files import create_bytes, make_folder
from fedemb.keys.base import DESTROYED, KEY_BYTES, KeyStore, checked_name, generation_name


class LocalKeyStore(KeyStore):
    """Keys as files; an empty file `<key>.destroyed` records that a key was destroyed."""

    def __init__(self, root: Path):
        self.root = root
        self.uri = str(root)

    @override
    def create(self, name: str, key: bytes | None = None) -> bytes:
        path = self._path(name)
        with self._reached(name):
            if self._destroyed(path).exists():
                raise FileExistsError(f"key {name} was destroyed and its name is not used again")
            make_folder(self.root.parent)
            for folder in (self.root, path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            key = key or os.urandom(KEY_BYTES)
            self._check_folders(path)
            create_bytes(path, key, mode=0o600)
        return key

    @override
    def fetch(self, name: str) -> bytes:
        path = self._path(name)
        with self._reached(name):
            destroyed = self._destroyed(path).exists()
            if destroyed or not path.exists():  # both: killed while destroying
                raise LedgerError(self._missing(name, destroyed))
            self._check_folders(path)
            key = path.read_bytes()
            mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise StorageError(
                f"key {name} in {self.uri} has mode {mode:04o}, expected 0600, so other "
                "users may read it. Create a new policy, or chmod 600 the key if it was not read"
            )
        return self._whole(name, key)

    @override
    def destroy(self, name: str) -> None:
        path = self._path(name)
        with self._reached(name):
            if path.exists():
                with contextlib.suppress(FileExistsError):
                    create_bytes(self._destroyed(path), b"", mode=0o600)
            # A killed creation leaves a temporary name, possibly a link to this file.
            for copy in (*path.parent.glob(f".{path.name}.????????"), path):
                with contextlib.suppress(FileNotFoundError):
                    _overwrite(copy)

    @override
    def exists(self, name: str) -> bool:
        path = self._path(name)
        with self._reached(name):
            return path.is_file() and not self._destroyed(path).exists()

    @override
    def used(self, name: str) -> bool:
        path = self._path(name)
        with self._reached(name):
            return path.exists() or self._destroyed(path).exists()

    @override
    def newest(self, name: str) -> int:
        path = self._path(name)
        with self._reached(name):
            later = (item.name.rpartition("@")[2] for item in path.parent.glob(f"{path.name}@*"))
            return max(
                [int(path.exists()), *(int(number) for number in later if number.isdecimal())]
            )

    @override
    def renew(self, name: str) -> int:
        while True:
            number = self.newest(name) + 1
            with contextlib.suppress(FileExistsError):  # another process renewed it concurrently
                self.create(generation_name(name, number))
                return number

    def _path(self, name: str) -> Path:
        kind, _, rest = checked_name(name).partition("/")
        if kind != "signing":
            return self.root / kind / rest
        # One folder per role, because on a cluster each can be a separate volume.
        return self.root / kind / rest.partition("@")[0] / rest

    def _check_folders(self, path: Path) -> None:
        """Refuses a folder in which every account may replace keys.

        The cluster sets the modes of a mounted volume, and only processes of the pod can access it.

        Raises:
          StorageError: names the folder.
        """
        for folder in (path.parent, *path.parent.parents):
            if stat.S_IMODE(folder.stat().st_mode) & 0o002 and not os.path.ismount(folder):
                raise StorageError(
                    f"folder {folder} of the key store has mode "
                    f"{stat.S_IMODE(folder.stat().st_mode):04o}, so any user may replace its keys. "
                    "Create a new policy, or chmod 700 the folder if no key was replaced"
                )
            if folder == self.root:
                return

    def _destroyed(self, path: Path) -> Path:
        return path.with_name(path.name + DESTROYED)

    @contextlib.contextmanager
    def _reached(self, name: str) -> Generator[None]:
        """Converts file system errors to StorageError."""
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            raise StorageError(
                f"key {name} in {self.uri} cannot be reached: {error.strerror}; run as the owner "
                "of the key store"
            ) from error

    def _missing(self, name: str, destroyed: bool) -> str:
        if destroyed:
            return f"key {name} was destroyed when its run was committed; start a new run"
        made = "the ledger was made with"
        if name.startswith("reservation/"):
            made = "the reservation was made with, or reserve under a new run id"
        return f"key {name} is not in the key store {self.uri}; name the key store {made}"


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    path.unlink(missing_ok=True)
