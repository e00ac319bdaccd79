"""The interface of every store, and transfers of file trees to and from it."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import cast

from fedemb.errors import ArtifactError, StorageError
from fedemb.foundation.canonical_json import (
    canonical_json,
    file_digest,
    json_digest,
    parse_json,
    tree_digests,
)
from fedemb.foundation.files import MOST_TEXT

TREE_SCHEMA = "fedemb/tree/1"
LARGEST = 1 << 40
"""Limit of bytes of an object that holds arrays of any size."""
PARALLEL_TRANSFERS = 8
"""Maximum number of objects transferred at the same time."""


@dataclass(frozen=True)
class Entry:
    """Metadata of an object that a store has without reading the object."""

    name: str
    size: int
    """Size in bytes."""
    version: str
    """Changes with the content: MD5 or generation (gs), ETag (s3); empty for a local file."""


def check_name(name: str) -> str:
    """Returns a name that is safe in every store: POSIX relative, no hidden part, no `..`.

    Raises:
      StorageError: the name is not safe.
    """
    if not nameable(name):
        raise StorageError(
            f"an object name of {len(name)} characters is not POSIX relative without hidden, empty "
            "or unprintable parts; rename it"
        )
    return name


def nameable(name: str) -> bool:
    """Returns whether the name is valid in every store, see `check_name`."""
    return (
        visible(name)
        and all(part.isprintable() for part in name.split("/"))
        and "\\" not in name
        and len(name.encode()) <= 900
    )


def visible(name: str) -> bool:
    """Returns whether a stored name is visible; temporary and foreign hidden files are not."""
    return not any(part.startswith(".") or part == "" for part in name.split("/"))


def why_failed(
    bucket: str, code: int | str | None, error: BaseException, *, missing: bool, denied: bool
) -> str:
    """Returns the reason for a bucket error and the next step, with one text for all services.

    `missing`: the code means that the bucket does not exist; `denied`: that permission is missing.
    """
    if missing:
        return f"the bucket {bucket} does not exist; create it or fix the address"
    if denied:
        return f"permission denied ({code}); grant this account the role of its step on {bucket}"
    if code:
        return f"the server answered {code}; try again, and ask its operator if it persists"
    cause = type(error).__name__
    return f"the connection failed ({cause}); check network and endpoint, then run again"


class Store(ABC):
    """Objects by POSIX relative name below one address. Safe to use from several threads."""

    uri: str
    local_root: Path | None = None
    """The folder of a file store; None for other stores."""

    def read(self, name: str, limit: int = MOST_TEXT) -> bytes:
        """Returns a whole object of at most `limit` bytes; the default is enough for a document.

        Raises:
          FileNotFoundError: the object does not exist.
          StorageError: the store cannot be read, or the object is larger, or is a pipe.
        """
        data = self.read_up_to(name, limit)
        if data is None:
            raise StorageError(
                f"{name} in {self.uri} has more than {limit:,} bytes and cannot be what belongs "
                "there. Restore it from a backup."
            )
        return data

    @abstractmethod
    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """Returns a whole object of at most `limit` bytes; None if it is larger.

        No more than `limit` + 1 bytes are held in memory.

        Raises:
          FileNotFoundError: the object does not exist.
          StorageError: the store cannot be read.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes or replaces a whole object; readers get the old or the new object.

        Raises:
          StorageError: the store cannot be written; nothing of `data` is visible.
        """

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Creates an object that must not exist; exactly one of several writers succeeds.

        Raises:
          FileExistsError: another writer created the name first.
          StorageError: the store cannot be written.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Returns whether the object exists."""

    def list(self, prefix: str = "") -> list[str]:
        """Returns all names that start with `prefix`, sorted."""
        return sorted(entry.name for entry in self.entries(prefix))

    @abstractmethod
    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields all objects that start with `prefix`, ordered by name, page by page."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes an object; a missing object is not an error."""

    @abstractmethod
    def digest(self, name: str) -> str | None:
        """Returns the SHA-256, recorded at upload or computed locally; None: missing or unknown."""

    def clock(self) -> datetime | None:
        """Returns the current time of the store; None if only this machine's clock is available.

        Raises:
          StorageError: the store cannot be reached.
        """
        return None

    def upload(self, local: Path, name: str) -> str:
        """Writes or replaces an object with a local file, in parts; returns its SHA-256.

        Raises:
          StorageError: the store cannot be written; nothing of the file is visible.
        """
        digest = file_digest(local)
        self._upload(local, check_name(name), digest)
        return digest

    @contextmanager
    def as_file(self, name: str) -> Iterator[Path]:
        """Yields an object as a local file: itself, or a temporary copy of a remote object.

        Raises:
          FileNotFoundError: the object does not exist.
          StorageError: the object cannot be read.
        """
        if self.local_root is not None:
            yield self.local_root / name
            return
        with tempfile.TemporaryDirectory(prefix="fedemb-") as folder:
            path = Path(folder, Path(name).name)
            self._download(name, path)
            yield path

    @abstractmethod
    def _upload(self, local: Path, name: str, digest: str) -> None: ...

    @abstractmethod
    def _download(self, name: str, local: Path) -> None: ...

    def upload_tree(self, local: Path, prefix: str) -> dict[str, str]:
        """Publishes all files below `local`; skips objects that exist already.

        Returns:
          Digests by name, as in the index, which is written last.

        Raises:
          StorageError: a file cannot be read or written; the tree then has no index.
        """
        if not local.is_dir():
            raise StorageError(f"the folder {local.name} to publish is missing; run its step first")
        check_name(prefix)
        digests = tree_digests(local)
        for name in digests:
            check_name(name)
        found = self._index(prefix)
        if found is not None and found != digests:
            self.delete(f"{prefix}.tree")

        def send(name: str) -> None:
            if self.digest(f"{prefix}/{name}") != digests[name]:
                self._upload(local / name, f"{prefix}/{name}", digests[name])

        _parallel(send, digests)
        if found != digests:
            self._write_index(prefix, digests)
        return digests

    def create_tree(self, local: Path, prefix: str) -> None:
        """Publishes a tree as `tree_name`, so that files of another writer cannot mix with it.

        Object stores cannot rename: the tree is written to a separate folder below `prefix`, named
        by its content, and becomes valid once an exclusively created object points to that folder.

        Raises:
          FileExistsError: the name is taken (folders only, where the tree is `prefix` itself).
          StorageError: as `upload_tree`.
        """
        self.upload_tree(local, self.tree_name(prefix, tree_digests(local)))

    def tree_name(self, prefix: str, digests: dict[str, str]) -> str:
        """Returns the name that `create_tree` gives to a tree with these digests."""
        return f"{prefix}/{json_digest(digests)[:16]}"

    def download_tree(self, prefix: str, local: Path) -> dict[str, str]:
        """Copies a tree to a local folder, verified against its index if any; returns its digests.

        Raises:
          ArtifactError: a file of the index is missing, or its content differs from the index.
          StorageError: the tree does not exist, or cannot be read.
        """
        check_name(prefix)
        expected = self._index(prefix)
        names = (
            [name.removeprefix(f"{prefix}/") for name in self.list(f"{prefix}/")]
            if expected is None
            else list(expected)
        )
        if not names and expected is None:
            raise StorageError(f"there is nothing below {self.uri}/{prefix}; check the address")
        digests: dict[str, str] = {}

        def fetch(name: str) -> None:
            target = local / check_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._download(f"{prefix}/{name}", target)
            except FileNotFoundError as error:
                raise ArtifactError(
                    f"a file of the tree {self.uri}/{prefix} is missing; publish it again"
                ) from error
            digests[name] = file_digest(target)
            if expected is not None and digests[name] != expected[name]:
                target.unlink()
                raise ArtifactError(
                    f"a file of the tree {self.uri}/{prefix} is not what its index says; publish "
                    "it again from the run that made it"
                )

        local.mkdir(parents=True, exist_ok=True)
        _parallel(fetch, names)
        return digests

    def _index(self, prefix: str) -> dict[str, str] | None:
        try:
            data = self.read(f"{prefix}.tree")
        except FileNotFoundError:
            return None
        files = parse_json(data, TREE_SCHEMA, f"{prefix}.tree")["files"]
        return cast("dict[str, str]", files)

    def _write_index(self, prefix: str, digests: dict[str, str]) -> None:
        self.write(f"{prefix}.tree", canonical_json({"schema": TREE_SCHEMA, "files": digests}))


def _parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    names = list(names)
    with ThreadPoolExecutor(min(PARALLEL_TRANSFERS, max(1, len(names)))) as pool:
        futures = [pool.submit(work, name) for name in names]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
