"""S3 and S3-compatible stores, through s3fs (aiobotocore)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.storage.base import PARALLEL_TRANSFERS, Entry, Store, check_name, visible, why_failed

CHUNK = 8 << 20
"""Bytes of one part; above twice this size uploads are multipart, with retries per part."""


class S3Store(Store):
    """Objects of one bucket below a prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Stores the address; the first operation makes the first connection."""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    def read(self, name: str) -> bytes:
        """Returns a whole object; see `Store.read`."""
        with self._sentences("read"):
            return self._fs.cat_file(self._path(name))

    def read_up_to(self, name: str, limit: int) -> bytes | None:
        """Returns an object of limited size; see `Store.read_up_to`."""
        with self._sentences("read"):
            try:
                data: bytes = self._fs.cat_file(self._path(name), start=0, end=limit + 1)
            except Exception as error:
                if _code(error) != "InvalidRange":
                    raise
                return b""  # an empty object has no range
        return None if len(data) > limit else data

    def write(self, name: str, data: bytes) -> None:
        """Replaces an object; see `Store.write`."""
        with self._sentences("written"):
            self._fs.pipe_file(self._path(name), data, Metadata=_digest_mark(sha256_hex(data)))

    def create(self, name: str, data: bytes) -> None:
        """Creates with `If-None-Match: *`; see `Store.create`.

        A retry after a lost response recognizes its own object by the writer's marker.
        """
        mark = secrets.token_hex(16)
        metadata = {**_digest_mark(sha256_hex(data)), "fedemb-writer": mark}
        with self._sentences("written"):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create", Metadata=metadata)
            except FileExistsError:
                if self._metadata(name).get("fedemb-writer") != mark:
                    raise

    def exists(self, name: str) -> bool:
        """Returns whether the object is listed; a missing bucket raises."""
        key = self._prefix + check_name(name)
        with self._sentences("read"):
            answer = self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=key, MaxKeys=1)
            return any(item["Key"] == key for item in answer.get("Contents", []))

    def list(self, prefix: str = "") -> list[str]:
        """Returns all visible names that start with `prefix`, sorted."""
        return sorted(entry.name for entry in self.entries(prefix))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yields visible objects, listed by the service in name order; see `Store.entries`."""
        page: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
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
            self._fs.call_s3(
                "delete_object", Bucket=self._bucket, Key=self._prefix + check_name(name)
            )

    def digest(self, name: str) -> str | None:
        """Returns the SHA-256 recorded by the writer; None if the object is missing or foreign."""
        try:
            return self._metadata(name).get("fedemb-sha256")
        except FileNotFoundError:
            return None

    def clock(self) -> datetime:
        """Returns the date of a response; see `Store.clock`."""
        with self._sentences("read"):
            answer = self._fs.call_s3("list_objects_v2", Bucket=self._bucket, MaxKeys=1)
            return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])

    def _upload(self, local: Path, name: str, digest: str) -> None:
        with self._sentences("written"):
            self._fs.put_file(
                str(local), self._path(name), chunksize=CHUNK, Metadata=_digest_mark(digest)
            )

    def _download(self, name: str, local: Path) -> None:
        with self._sentences("read"):
            self._fs.get_file(self._path(name), str(local))

    def _metadata(self, name: str) -> dict[str, str]:
        with self._sentences("read"):
            answer = self._fs.call_s3(
                "head_object", Bucket=self._bucket, Key=self._prefix + check_name(name)
            )
            return dict(answer.get("Metadata", {}))

    def _path(self, name: str) -> str:
        return f"{self._bucket}/{self._prefix}{check_name(name)}"

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

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, FileExistsError):
            raise
        except Exception as error:
            code = _code(error)
            if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                raise FileNotFoundError(f"no such object in {self.uri}") from error
            reason = _reason(error, code, self._bucket)
            raise StorageError(
                f"Store {self.uri} could not be {what}: {reason}. Check its address and "
                "permissions."
            ) from error


def _digest_mark(digest: str) -> dict[str, str]:
    return {"fedemb-sha256": digest}


def _code(error: BaseException | None) -> str:
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _reason(error: Exception, code: str, bucket: str) -> str:
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return "no AWS credentials were found; set AWS_ACCESS_KEY_ID, a profile or a service role"
    denied = isinstance(error, PermissionError) or code in ("AccessDenied", "403")
    return why_failed(bucket, code, error, missing=code == "NoSuchBucket", denied=denied)
