"""Google Cloud Storage through its official client: typed errors, bounded retries, preconditions.

gcsfs is not used, because its retries (31 s) and credential search cannot be bounded by the caller.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.storage.base import PARALLEL_TRANSFERS, Entry, Store, check_name, visible, why_failed

RETRY_SECONDS = 10.0
"""Maximum seconds of retries after transient failures."""
TIMEOUT = (5.0, 20.0)
"""Timeouts in seconds: to connect, and to wait for the next byte."""
CHUNK = 8 << 20
"""Bytes per request of a resumable upload; larger objects are uploaded resumably."""


_NO_RANGE = 416
"""HTTP status of a range that is not in the object."""


class GcsStore(Store):
    """Objects of one bucket below a prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Stores the address; the first operation makes the first connection."""
        self.uri = f"gs://{bucket}/{prefix}".rstrip("/")
        self._bucket_name = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def read(self, name: str) -> bytes:
        """Returns a whole object; see `Store.read`."""
        with self._sentences("read"):
            return self._blob(name).download_as_bytes(retry=self._retry, timeout=TIMEOUT)

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """Returns an object of limited size; see `Store.read_up_to`."""
        with self._sentences("read"):
            try:
                data: bytes = self._blob(name).download_as_bytes(
                    start=0, end=limit, retry=self._retry, timeout=TIMEOUT
                )
            except Exception as error:
                if _code(error) != _NO_RANGE:
                    raise
                return b""  # an empty object has no range
        return None if len(data) > limit else data

    def write(self, name: str, data: bytes) -> None:
        """Replaces an object; see `Store.write`."""
        self._send(name, data, {"fedemb-sha256": sha256_hex(data)})

    def create(self, name: str, data: bytes) -> None:
        """Creates with `if_generation_match=0`; see `Store.create`.

        A retry after a lost response recognizes its own object by the writer's marker.
        """
        from google.api_core.exceptions import Forbidden, PreconditionFailed

        mark = secrets.token_hex(16)
        metadata = {"fedemb-sha256": sha256_hex(data), "fedemb-writer": mark}
        try:
            self._send(name, data, metadata, if_generation_match=0)
        except (PreconditionFailed, StorageError) as error:
            # Without permission to replace, the service may deny access before it checks the
            # condition.
            told = isinstance(error, PreconditionFailed) or isinstance(error.__cause__, Forbidden)
            if not told or not self.exists(name):
                raise
            if self._metadata(name).get("fedemb-writer") != mark:
                raise FileExistsError(f"{name} exists already in {self.uri}") from error

    def exists(self, name: str) -> bool:
        """Returns whether the object exists; a missing bucket raises."""
        try:
            self._metadata(name)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        """Returns all visible names that start with `prefix`, sorted."""
        names = [blob.name.removeprefix(self._prefix) for blob in self._blobs(prefix, "name")]
        return sorted(filter(visible, names))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields visible objects, listed by the service in name order; see `Store.entries`."""
        for blob in self._blobs(prefix, "name,size,md5Hash,generation"):
            name = blob.name.removeprefix(self._prefix)
            if visible(name):  # a composed object has no MD5
                yield Entry(name, int(blob.size or 0), blob.md5_hash or f"#{blob.generation}")

    def _blobs(self, prefix: str, fields: str) -> Iterator[Any]:
        with self._sentences("listed"):
            yield from self._bucket.client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields=f"items({fields}),nextPageToken",
                retry=self._retry,
                timeout=TIMEOUT,
            )

    def delete(self, name: str) -> None:
        """Deletes an object; a missing object is not an error."""
        with suppress(FileNotFoundError), self._sentences("deleted"):
            self._blob(name).delete(retry=self._retry, timeout=TIMEOUT)

    def digest(self, name: str) -> str | None:
        """Returns the SHA-256 recorded by the writer; None if the object is missing or foreign."""
        try:
            return self._metadata(name).get("fedemb-sha256")
        except FileNotFoundError:
            return None

    def clock(self) -> datetime:
        """Returns the date of a response of any status; see `Store.clock`."""
        with self._sentences("read"):
            client = self._bucket.client
            address = f"{client._connection.API_BASE_URL}/storage/v1/b/{self._bucket_name}"
            answer = client._http.get(address, params={"fields": "name"}, timeout=TIMEOUT)
            return parsedate_to_datetime(answer.headers["Date"])

    def _upload(self, local: Path, name: str, digest: str) -> None:
        self._send(name, local, {"fedemb-sha256": digest})

    def _download(self, name: str, local: Path) -> None:
        with self._sentences("read"):
            self._blob(name).download_to_filename(
                str(local), retry=self._retry, timeout=TIMEOUT, raw_download=True
            )

    def _send(
        self, name: str, source: bytes | Path, metadata: dict[str, str], **conditions: int
    ) -> None:
        with self._sentences("written"):
            size = len(source) if isinstance(source, bytes) else source.stat().st_size
            blob = self._bucket.blob(
                self._prefix + check_name(name), chunk_size=CHUNK if size > CHUNK else None
            )
            blob.metadata = metadata
            options: dict[str, Any] = {
                "retry": self._retry,
                "timeout": TIMEOUT,
                "checksum": "crc32c",
                "content_type": "application/octet-stream",
                **conditions,
            }
            if isinstance(source, bytes):
                blob.upload_from_string(source, **options)
            else:
                blob.upload_from_filename(str(source), **options)

    def _metadata(self, name: str) -> dict[str, str]:
        with self._sentences("read"):
            blob = self._blob(name)
            blob.reload(retry=self._retry, timeout=TIMEOUT)
            return dict(blob.metadata or {})

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + check_name(name))

    @cached_property
    def _retry(self) -> Any:
        from google.cloud.storage.retry import DEFAULT_RETRY

        return DEFAULT_RETRY.with_timeout(RETRY_SECONDS).with_delay(initial=0.2, maximum=2.0)

    @cached_property
    def _bucket(self) -> Any:
        from google.cloud import storage
        from requests.adapters import HTTPAdapter

        if os.environ.get("STORAGE_EMULATOR_HOST"):
            from google.auth.credentials import AnonymousCredentials

            client = storage.Client(credentials=AnonymousCredentials(), project="emulator")
        else:
            client = storage.Client(credentials=_credentials(), project="unused")
        session = client._http  # pyright: ignore[reportPrivateUsage]
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=PARALLEL_TRANSFERS))
        return client.bucket(self._bucket_name)

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, FileNotFoundError):
            raise
        except Exception as error:
            if type(error).__name__ == "PreconditionFailed":
                raise
            if what in ("read", "deleted") and _is_missing_object(error):
                raise FileNotFoundError(f"no such object in {self.uri}") from error
            raise StorageError(
                f"Store {self.uri} could not be {what}: {_reason(error, self._bucket_name)}. "
                "Check its address and permissions."
            ) from error


def _credentials() -> Any:
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    os.environ.setdefault("GCE_METADATA_DETECT_RETRIES", "1")
    try:
        credentials, _ = google.auth.default(
            scopes=["https://www.googleapis.com/auth/devstorage.read_write"]
        )
    except GoogleAuthError as error:
        raise StorageError(
            "no Google credentials were found; run `gcloud auth application-default login`, or set "
            "up Workload Identity for this service account"
        ) from error
    return credentials


def _code(error: Exception) -> int | None:
    error = getattr(error, "cause", None) or error  # RetryError wraps the last error
    response = getattr(error, "response", None)
    code = getattr(error, "code", None) or getattr(response, "status_code", None)
    return None if code is None else int(code)


def _is_missing_object(error: Exception) -> bool:
    return _code(error) == 404 and "bucket does not exist" not in str(error).lower()


def _reason(error: Exception, bucket: str) -> str:
    code, cause = _code(error), getattr(error, "cause", None) or error
    return why_failed(bucket, code, cause, missing=code == 404, denied=code in (401, 403))
