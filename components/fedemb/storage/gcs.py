"""Google Cloud Storage through its official client: typed errors, bounded retries, preconditions.

gcsfs is not used, because its retries (31 s) and credential search cannot be bounded by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fedemb.errors import StorageError
from fedemb.storage.base import PARALLEL_TRANSFERS, Entry, visible, why_failed
from fedemb.storage.bucket import CHUNK, BucketStore

RETRY_SECONDS = 10.0
"""Maximum seconds of retries after transient failures."""
TIMEOUT = (5.0, 20.0)
"""Timeouts in seconds: to connect, and to wait for the next byte."""


class GcsStore(BucketStore):
    """Objects of one bucket below a prefix."""

    scheme: ClassVar[str] = "gs"

    def exists(self, name: str) -> bool:
        """Returns whether the object exists; a missing bucket raises."""
        try:
            self._metadata(name)
        except FileNotFoundError:
            return False
        return True

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields visible objects, listed by the service in name order; see `Store.entries`."""
        with self._sentences("listed"):
            for blob in self._bucket.client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name,size,md5Hash,generation),nextPageToken",
                retry=self._retry,
                timeout=TIMEOUT,
            ):
                name = blob.name.removeprefix(self._prefix)
                if visible(name):  # a composed object has no MD5
                    yield Entry(name, int(blob.size or 0), blob.md5_hash or f"#{blob.generation}")

    def delete(self, name: str) -> None:
        """Deletes an object; a missing object is not an error."""
        with suppress(FileNotFoundError), self._sentences("deleted"):
            self._blob(name).delete(retry=self._retry, timeout=TIMEOUT)

    def clock(self) -> datetime:
        """Returns the date of a response of any status; see `Store.clock`."""
        with self._sentences("read"):
            client = self._bucket.client
            address = f"{client._connection.API_BASE_URL}/storage/v1/b/{self._bucket_name}"
            answer = client._http.get(address, params={"fields": "name"}, timeout=TIMEOUT)
            return parsedate_to_datetime(answer.headers["Date"])

    def _get(self, name: str, end: int | None) -> bytes:
        part = {} if end is None else {"start": 0, "end": end - 1}
        return self._blob(name).download_as_bytes(retry=self._retry, timeout=TIMEOUT, **part)

    def _download(self, name: str, local: Path) -> None:
        with self._sentences("read"):
            self._blob(name).download_to_filename(
                str(local), retry=self._retry, timeout=TIMEOUT, raw_download=True
            )

    def _put(
        self, name: str, source: bytes | Path, metadata: dict[str, str], *, create: bool = False
    ) -> None:
        with self._sentences("written"):
            size = len(source) if isinstance(source, bytes) else source.stat().st_size
            blob = self._bucket.blob(self._key(name), chunk_size=CHUNK if size > CHUNK else None)
            blob.metadata = metadata
            options: dict[str, Any] = {
                "retry": self._retry,
                "timeout": TIMEOUT,
                "checksum": "crc32c",
                "content_type": "application/octet-stream",
                "if_generation_match": 0 if create else None,
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
        return self._bucket.blob(self._key(name))

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

    def _code(self, error: BaseException | None) -> str:
        error = getattr(error, "cause", None) or error  # RetryError wraps the last error
        response = getattr(error, "response", None)
        code = getattr(error, "code", None) or getattr(response, "status_code", None)
        return "" if code is None else str(int(code))

    def _reason(self, error: Exception, what: str) -> str | None:
        code, cause = self._code(error), getattr(error, "cause", None) or error
        if code == "412":
            raise FileExistsError(f"an object exists already in {self.uri}") from error
        absent = code == "404" and "bucket does not exist" not in str(error).lower()
        if isinstance(error, FileNotFoundError) or (absent and what in ("read", "deleted")):
            return None
        denied = code in ("401", "403")
        return why_failed(self._bucket_name, code, cause, missing=code == "404", denied=denied)


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
