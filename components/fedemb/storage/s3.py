"""S3 and S3-compatible stores, through s3fs (aiobotocore)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fedemb.storage.base import PARALLEL_TRANSFERS, Entry, visible, why_failed
from fedemb.storage.bucket import CHUNK, BucketStore


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
