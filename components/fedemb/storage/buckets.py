"""Buckets of Google Cloud Storage, S3 and S3-compatible stores."""

from __future__ import annotations

import os
import secrets
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.storage.base import (
    LARGEST,
    PARALLEL_TRANSFERS,
    Entry,
    Store,
    check_name,
    visible,
    why_failed,
)

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
    def read_up_to(self, name: str, limit: int) -> bytes | None:
        with self._sentences("read"):
            try:
                data = self._get(name, limit + 1 if limit < LARGEST else None)
            except Exception as error:
                if self._code(error) not in ("InvalidRange", "416"):
                    raise
                return b""  # an empty object has no range
        return None if len(data) > limit else data

    @override
    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, {"fedemb-sha256": sha256_hex(data)})

    @override
    def create(self, name: str, data: bytes) -> None:
        """Creates with a condition of the service; see `Store.create`.

        A retry after a lost response recognizes its own object by the writer's marker.
        """
        mark = secrets.token_hex(16)
        metadata = {"fedemb-sha256": sha256_hex(data), "fedemb-writer": mark}
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
        self._put(name, local, {"fedemb-sha256": digest})

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


class S3Store(BucketStore):
    """Objects of one bucket below a prefix."""

    scheme: ClassVar[str] = "s3"

    def exists(self, name: str) -> bool:
        """Returns whether the object is listed; a missing bucket raises."""
        key = self._key(name)
        with self._sentences("read"):
            answer = self._fs.call_s3(
                "list_objects_v2", Bucket=self._bucket_name, Prefix=key, MaxKeys=1
            )
            return any(item["Key"] == key for item in answer.get("Contents", []))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields visible objects, listed by the service in name order; see `Store.entries`."""
        page: dict[str, Any] = {"Bucket": self._bucket_name, "Prefix": self._prefix + prefix}
        while True:
            with self._sentences("listed"):
                answer = self._fs.call_s3("list_objects_v2", **page)
            for item in answer.get("Contents", []):
                name = item["Key"].removeprefix(self._prefix)
                if visible(name):
                    yield Entry(name, int(item["Size"]), str(item["ETag"]).strip('"'))
            if not answer.get("IsTruncated"):
                return
            page["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, name: str) -> None:
        """Deletes an object; a missing object is not an error."""
        with self._sentences("deleted"):
            self._fs.call_s3("delete_object", Bucket=self._bucket_name, Key=self._key(name))

    def clock(self) -> datetime:
        """Returns the date of a response; see `Store.clock`."""
        with self._sentences("read"):
            answer = self._fs.call_s3("list_objects_v2", Bucket=self._bucket_name, MaxKeys=1)
            return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

    def _get(self, name: str, end: int | None) -> bytes:
        part = {} if end is None else {"start": 0, "end": end}
        return self._fs.cat_file(self._path(name), **part)

    def _put(
        self, name: str, source: bytes | Path, metadata: dict[str, str], *, create: bool = False
    ) -> None:
        mode = "create" if create else "overwrite"
        with self._sentences("written"):
            if isinstance(source, bytes):
                self._fs.pipe_file(self._path(name), source, mode=mode, Metadata=metadata)
            else:
                self._fs.put_file(str(source), self._path(name), chunksize=CHUNK, Metadata=metadata)

    def _download(self, name: str, local: Path) -> None:
        with self._sentences("read"):
            self._fs.get_file(self._path(name), str(local))

    def _metadata(self, name: str) -> dict[str, str]:
        with self._sentences("read"):
            answer = self._fs.call_s3("head_object", Bucket=self._bucket_name, Key=self._key(name))
            return dict(answer.get("Metadata", {}))

    def _path(self, name: str) -> str:
        return f"{self._bucket_name}/{self._key(name)}"

    @cached_property
    def _fs(self) -> Any:
        from s3fs import S3FileSystem

        system = S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            max_concurrency=4,
            config_kwargs={
                "connect_timeout": 5,
                "read_timeout": 20,
                "max_pool_connections": 2 * PARALLEL_TRANSFERS,
                "retries": {"max_attempts": 3, "mode": "standard"},
            },
        )
        system.retries = 2  # retries of s3fs, in addition to those of the client
        return system

    def _code(self, error: BaseException | None) -> str:
        while error is not None:
            response = getattr(error, "response", None)
            if isinstance(response, dict):
                return str(response.get("Error", {}).get("Code", ""))
            error = error.__cause__
        return ""

    def _reason(self, error: Exception, what: str) -> str | None:
        code = self._code(error)
        if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
            return None
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            return (
                "no AWS credentials were found; set AWS_ACCESS_KEY_ID, a profile or a service role"
            )
        denied = isinstance(error, PermissionError) or code in ("AccessDenied", "403")
        missing = code == "NoSuchBucket"
        return why_failed(self._bucket_name, code, error, missing=missing, denied=denied)
