"""Stores: whole objects and trees of files on `file`, `gs` and `s3`, with exclusive create.

Every backend guarantees:

- Reads and writes of an object are atomic.
- `create` succeeds for exactly one of several writers, and a retry after a lost response recognizes
  its own object.
- A tree published with `upload_tree` is complete once its index (`<tree>.tree`) exists, and is
  verified against the index when it is read.
- A failure raises a `StorageError` with a one-sentence message within seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from fedemb.errors import InputError, StorageError
from fedemb.foundation.addresses import split_address
from fedemb.foundation.environment import require_modules
from fedemb.storage.base import LARGEST as LARGEST
from fedemb.storage.base import Entry as Entry
from fedemb.storage.base import Store as Store
from fedemb.storage.base import nameable as nameable
from fedemb.storage.local import LocalStore as LocalStore


def open_store(uri: str | Path) -> Store:
    """Opens the store at `uri`; the first operation makes the first connection.

    Args:
      uri: a local path, `file:///path`, `gs://bucket/prefix` or `s3://bucket/prefix`.

    Raises:
      InputError: the address has another scheme, has no bucket, or contains credentials.
      ConfigError: the client of the bucket's service is not installed.
    """
    scheme, bucket, prefix = _parse(str(uri))
    if scheme == "file":
        return LocalStore(Path(prefix))
    require_modules("google.cloud.storage" if scheme == "gs" else "s3fs")
    if scheme == "gs":
        from fedemb.storage.buckets import GcsStore

        return GcsStore(bucket, prefix)
    from fedemb.storage.buckets import S3Store

    return S3Store(bucket, prefix)


def join(uri: str | Path, *parts: str) -> str:
    """Appends POSIX parts to an address.

    >>> join("gs://bucket/runs/", "a", "model")
    'gs://bucket/runs/a/model'
    """
    return "/".join([str(uri).rstrip("/"), *(part.strip("/") for part in parts)]) or "/"


@contextmanager
def local_tree(uri: str | Path) -> Iterator[Path]:
    """Yields the tree at `uri` as local files: the path the path, or a temporary copy if remote.

    Raises:
      ArtifactError: the tree is incomplete, or does not match its index.
      StorageError: the tree is missing or cannot be read.
    """
    store = open_store(uri)
    if store.local_root is not None:
        if not store.local_root.exists():
            raise StorageError(f"there is nothing at {store.uri}; check the address")
        yield store.local_root
        return
    parent, name = _split(str(uri))
    with tempfile.TemporaryDirectory(prefix="fedemb-") as temporary:
        target = Path(temporary, "tree")
        open_store(parent).download_tree(name, target)
        yield target


def _parse(uri: str) -> tuple[str, str, str]:
    if "://" not in uri:
        if not uri:
            raise InputError("the address of a store is empty; give a path, gs:// or s3://")
        return "file", "", str(Path(uri).expanduser().absolute())
    parts = split_address(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return "file", "", unquote(parts.path)
    if parts.scheme in ("gs", "s3") and parts.netloc and not parts.query:
        return parts.scheme, parts.netloc, parts.path.strip("/")
    if parts.scheme in ("gs", "s3") and not parts.netloc:
        raise InputError(f"{parts.scheme}:// names no bucket; give {parts.scheme}://bucket/prefix")
    raise InputError(
        f"Unsupported storage URI {parts.scheme}://{parts.netloc}. Use a local path, "
        "file:///path, gs://bucket/prefix or s3://bucket/prefix."
    )


def _split(uri: str) -> tuple[str, str]:
    parent, _, name = uri.rstrip("/").rpartition("/")
    if "://" not in uri:
        path = Path(uri).expanduser().absolute()
        return str(path.parent), path.name
    if not name or parent.endswith(":/"):
        raise InputError(f"{uri} is a whole store; name a folder below it for a tree")
    return parent, name
