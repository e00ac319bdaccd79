"""What every store can do, and how a tree of files moves to and from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from components.fedemb.artifacts import canonical_json, file_digest, parse_json
from components.fedemb.errors import StorageError

TREE_SCHEMA = "fedemb/tree/1"
PARALLEL_TRANSFERS = 8
"""Objects moved at the same time."""

Progress = Callable[[int, int], None]
"""Called after each object with objects done and objects in all; from one thread at a time."""


def check_name(name: str) -> str:
    """Returns a name that is safe in every store: POSIX relative, nothing hidden, no `..`.

    Raises:
      StorageError: it is not.
    """
    parts = name.split("/")
    if any(part == "" or part.startswith(".") or not part.isprintable() for part in parts) or (
        "\\" in name or len(name.encode()) > 900
    ):
        raise StorageError(
            f"an object name of {len(name)} characters is not POSIX relative without hidden, empty "
            "or unprintable parts; rename it"
        )
    return name


def visible(name: str) -> bool:
    """Whether a stored name is one of ours: temporary and foreign hidden files are not."""
    return not any(part.startswith(".") or part == "" for part in name.split("/"))


class Store(ABC):
    """Objects by POSIX relative name below one address. Safe to use from several threads."""

    uri: str
    local_root: Path | None = None
    """The folder, for file stores."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Returns a whole object.

        Raises:
          FileNotFoundError: there is no such object.
          StorageError: the store cannot be read.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes or replaces a whole object; readers see the old or the new one.

        Raises:
          StorageError: the store cannot be written; nothing of `data` is visible.
        """

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Creates an object that must not exist; of many writers exactly one succeeds.

        Raises:
          FileExistsError: somebody else created the name first.
          StorageError: the store cannot be written.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether the object is there."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Returns all names that begin with `prefix`, sorted."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes an object; no error when it is gone already."""

    @abstractmethod
    def digest(self, name: str) -> str | None:
        """SHA-256 recorded at upload (remote) or computed (local); None: missing or unknown."""

    @abstractmethod
    def _upload(self, local: Path, name: str, digest: str) -> None: ...

    @abstractmethod
    def _download(self, name: str, local: Path) -> None: ...

    def upload_tree(
        self, local: Path, prefix: str, *, progress: Progress | None = None
    ) -> dict[str, str]:
        """Publishes all files below `local`; objects that are there already are not sent again.

        Returns:
          The digests by name, as in the index that is written last.

        Raises:
          StorageError: a file cannot be read or written; the tree has no index then.
        """
        if not local.is_dir():
            raise StorageError(f"the folder {local.name} to publish is missing; run its step first")
        check_name(prefix)
        files = sorted(path for path in local.rglob("*") if path.is_file())
        digests = {path.relative_to(local).as_posix(): file_digest(path) for path in files}
        for name in digests:
            check_name(name)
        found = self._index(prefix)
        if found is not None and found != digests:
            self.delete(f"{prefix}.tree")

        def send(name: str) -> None:
            if self.digest(f"{prefix}/{name}") != digests[name]:
                self._upload(local / name, f"{prefix}/{name}", digests[name])

        _parallel(send, digests, progress)
        if found != digests:
            self._write_index(prefix, digests)
        return digests

    def download_tree(
        self, prefix: str, local: Path, *, progress: Progress | None = None
    ) -> dict[str, str]:
        """Copies a tree to the local folder; one that we published is checked against its index.

        Returns:
          The digests by name.

        Raises:
          StorageError: nothing there, a file of the index missing, or other content than recorded.
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
                raise StorageError(
                    f"a file of the tree {self.uri}/{prefix} is missing; publish it again"
                ) from error
            digests[name] = file_digest(target)
            if expected is not None and digests[name] != expected[name]:
                target.unlink()
                raise StorageError(
                    f"a file of the tree {self.uri}/{prefix} is not what its index says; publish "
                    "it again from the run that made it"
                )

        local.mkdir(parents=True, exist_ok=True)
        _parallel(fetch, names, progress)
        return digests

    def _index(self, prefix: str) -> dict[str, str] | None:
        try:
            data = self.read(f"{prefix}.tree")
        except FileNotFoundError:
            return None
        return parse_json(data, TREE_SCHEMA, f"{prefix}.tree")["files"]

    def _write_index(self, prefix: str, digests: dict[str, str]) -> None:
        self.write(f"{prefix}.tree", canonical_json({"schema": TREE_SCHEMA, "files": digests}))


def _parallel(work: Callable[[str], None], names: Iterable[str], progress: Progress | None) -> None:
    names = list(names)
    with ThreadPoolExecutor(min(PARALLEL_TRANSFERS, max(1, len(names)))) as pool:
        futures = [pool.submit(work, name) for name in names]
        try:
            for done, future in enumerate(futures, start=1):
                future.result()
                if progress is not None:
                    progress(done, len(names))
        except BaseException:
            for future in futures:
                future.cancel()
            raise
