"""Names, digests, exclusive create and error sentences of both bucket services."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.storage.base import Store, check_name

CHUNK = 8 << 20
"""Bytes of one part of an upload; larger objects are uploaded in parts, with retries per part."""


class BucketStore(Store):
    """Objects of one bucket below a prefix."""

    scheme: ClassVar[str]

    def __init__(self, bucket: str, prefix: str) -> None:
        """Stores the address; the first operation makes the first connection."""
        self.uri = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")
        self._bucket_name = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    @override
    def read(self, name: str) -> bytes:
        with self._sentences("read"):
            return self._get(name, None)

    @override
    def read_up_to(self, name: str, limit: int) -> bytes | None:
        with self._sentences("read"):
            try:
                data = self._get(name, limit + 1)
            except Exception as error:
                if self._code(error) not in ("InvalidRange", "416"):
                    raise
                return b""  # an empty object has no range
        return None if len(data) > limit else data

    @override
    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, _digest_mark(sha256_hex(data)))

    @override
    def create(self, name: str, data: bytes) -> None:
        """Creates with a condition of the service; see `Store.create`.

        A retry after a lost response recognizes its own object by the writer's marker.
        """
        mark = secrets.token_hex(16)
        metadata = {**_digest_mark(sha256_hex(data)), "fedemb-writer": mark}
        try:
            self._put(name, data, metadata, create=True)
        except (FileExistsError, StorageError) as error:
            # Without permission to replace, Google's service may deny access before it checks the
            # condition.
            denied = type(error.__cause__).__name__ == "Forbidden"
            if not isinstance(error, FileExistsError) and not (denied and self.exists(name)):
                raise
            if self._metadata(name).get("fedemb-writer") != mark:
                raise FileExistsError(f"{name} exists already in {self.uri}") from error

    @override
    def digest(self, name: str) -> str | None:
        """Returns the SHA-256 recorded by the writer; None if the object is missing or foreign."""
        try:
            return self._metadata(name).get("fedemb-sha256")
        except FileNotFoundError:
            return None

    @override
    def _upload(self, local: Path, name: str, digest: str) -> None:
        self._put(name, local, _digest_mark(digest))

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, FileExistsError):
            raise
        except Exception as error:
            reason = self._reason(error, what)
            if reason is None:
                raise FileNotFoundError(f"no such object in {self.uri}") from error
            raise StorageError(
                f"Store {self.uri} could not be {what}: {reason}. Check its address and "
                "permissions."
            ) from error

    @abstractmethod
    def _get(self, name: str, end: int | None) -> bytes:
        """Returns an object, or only its first `end` bytes."""

    @abstractmethod
    def _put(
        self, name: str, source: bytes | Path, metadata: dict[str, str], *, create: bool = False
    ) -> None:
        """Writes an object; with `create` raises FileExistsError if the object exists."""

    @abstractmethod
    def _metadata(self, name: str) -> dict[str, str]: ...

    @abstractmethod
    def _code(self, error: BaseException | None) -> str:
        """Returns the code of the service in an error; empty: it has none."""

    @abstractmethod
    def _reason(self, error: Exception, what: str) -> str | None:
        """Returns why an operation failed; None: the object is missing."""


def _digest_mark(digest: str) -> dict[str, str]:
    return {"fedemb-sha256": digest}
