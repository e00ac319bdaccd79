"""Writing the partition: everything by workers, only the manifest by the driver, manifest last.

Every file is written under a temporary name and renamed, or put as a whole object, with bytes that
depend on its content alone: a shard written twice, by a retry or a straggler, is the same shard. A
folder without its `manifest.json` is incomplete, and readers reject it. No process holds the images
of a shard in memory: they go to a temporary file unsorted, and from there in the order of their
users.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedemb.config import RunConfig
from fedemb.data.client_data import (
    STORE_SCHEMA,
    WRITER_OPTIONS,
    GroupPiece,
    encode_groups,
    encode_index,
    group_files,
    groups_in_file,
    groups_name,
    index_name,
    shard_name,
)
from fedemb.data.records import decode_user, encode_user
from fedemb.errors import StorageError
from fedemb.foundation.canonical_json import (
    JsonFields,
    ToJson,
    canonical_json,
    json_digest,
    sha256_hex,
)
from fedemb.foundation.files import AppendedFile
from fedemb.storage import Store, join, open_store
from fedemb.storage.fencing import TOKENS, FencedStore, FencingToken

USERS, EVALUATION, REJECTS, WORK = "users", "evaluation", "rejects", "partition"
COUNTS = f"{WORK}/counts.json"

UserRow = tuple[bytes, int, bytes]
"""User key, images, encoded user record with tokens of the images, see `Spill`."""
_SPILLED = struct.Struct(">QQ")
"""Position and length of spilled bytes."""
Written = tuple[str, str, int, int]
"""Name of a file in its folder, SHA-256, and of a shard its users and images, else 0."""


@dataclass(frozen=True)
class Place:
    """Where a pass writes, with its fencing token; passed to every worker."""

    root: str
    """Address below which the folders of the run are."""
    token: FencingToken

    @classmethod
    def take(cls, root: str) -> Place:
        """Takes the next fencing token at `root`, which stops an earlier pass that still runs."""
        return cls(root, FencingToken(join(root, WORK), "partition_users"))

    @property
    def store(self) -> Store:
        """The folders, while the token is the newest."""
        return FencedStore(open_store(self.root), self.token)


class Spill:
    """Images in a file, so that an engine in one process holds 48 bytes for each.

    Any number of spills share a file. Tokens are in the order of the SHA-256 of their bytes, with
    and without a file, so that the smallest one does not depend on the engine.

    Args:
      path: the file; empty: tokens contain the bytes.
    """

    def __init__(self, path: str):
        file = Path(path).open("a+b", buffering=0) if path else None  # noqa: SIM115
        self._file = file and AppendedFile(file)

    def put(self, data: bytes) -> bytes:
        """Returns a token for bytes.

        Raises:
          StorageError: the disk is full.
        """
        digest = hashlib.sha256(data).digest()
        if self._file is None:
            return digest + data
        return digest + _SPILLED.pack(self._file.append(data), len(data))

    def get(self, token: bytes) -> bytes:
        """Returns the bytes of a token."""
        if self._file is None:
            return token[32:]
        return self._file.read(*_SPILLED.unpack(token[32:]))

    def whole(self, record: bytes) -> bytes:
        """Returns an encoded user record with the images of its tokens."""
        user = decode_user(record)
        return encode_user(replace(user, images=tuple(map(self.get, user.images))))


def clean(place: Place) -> None:
    """Deletes what an earlier attempt of the same run left, manifests first.

    Raises:
      StorageError: the private root cannot be written.
      Superseded: the step was started again meanwhile.
    """
    _delete(place, (USERS, EVALUATION, REJECTS, WORK))


def _delete(place: Place, kinds: Sequence[str]) -> None:
    store = place.store
    names = [name for kind in kinds for name in store.list(f"{kind}/")]
    names = [name for name in names if not name.startswith(f"{WORK}/{TOKENS}/")]
    for name in sorted(names, key=lambda name: not name.endswith("manifest.json")):
        store.delete(name)
    if store.local_root is not None:
        place.token.check()
        for kind in kinds:  # hidden leftovers and empty folders
            folder = store.local_root / kind
            for left in folder.glob("*") if kind == WORK else [folder]:
                if left.is_dir() and left.name != TOKENS:
                    shutil.rmtree(left, ignore_errors=True)


def write_shard(
    place: Place, kind: str, shard: int, *, shards: int, rows: Iterable[UserRow], spill: Spill
) -> tuple[list[Written], np.ndarray]:
    """Writes one shard of users, given in any order, and its index.

    Memory: 20 bytes a user of the shard; their records go over a temporary file.

    Returns:
      The files, and the user keys in the order of the records, uint64 [users].

    Raises:
      StorageError: disk full or no permission; no half-written shard stays.
    """
    store = place.store
    name = shard_name(kind, shard, shards)
    with tempfile.TemporaryDirectory(prefix="fedemb-") as folder:
        path = Path(folder, name)
        try:
            keys, images = _write_sorted(rows, path, spill)
        except (OSError, RuntimeError) as error:  # ArrayRecord reports a full disk as RuntimeError
            raise StorageError(
                f"could not write {name} to the temporary folder; free space there (TMPDIR), then "
                "run again"
            ) from error
        digest = store.upload(path, f"{kind}/{name}")
    index = encode_index(keys, images)
    store.write(f"{kind}/{index_name(name)}", index)
    return [
        (name, digest, len(keys), int(images.sum())),
        (index_name(name), sha256_hex(index), 0, 0),
    ], keys


def _write_sorted(
    rows: Iterable[UserRow], path: Path, spill: Spill
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the records in the order of their users; returns keys and images in that order."""
    from array_record.python.array_record_module import ArrayRecordWriter

    with tempfile.TemporaryFile(dir=path.parent) as file:
        keys, images, starts = _spill(rows, file)
        order = np.argsort(keys)
        writer = ArrayRecordWriter(str(path), WRITER_OPTIONS)
        for row in order.tolist():
            first, last = int(starts[row]), int(starts[row + 1])
            writer.write(spill.whole(os.pread(file.fileno(), last - first, first)))
        writer.close()
    return keys[order], images[order]


def _spill(rows: Iterable[UserRow], file: BinaryIO) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys, images, starts = array("Q"), array("I"), array("Q", [0])
    for key, count, record in rows:
        keys.append(int.from_bytes(key, "big"))
        images.append(count)
        starts.append(starts[-1] + file.write(record))
    file.flush()
    return np.array(keys, np.uint64), np.array(images, np.uint32), np.array(starts, np.uint64)


def write_groups(
    place: Place, grouping: int, part: int, *, virtual_clients: int, pieces: Iterable[GroupPiece]
) -> Written:
    """Writes one file of the groups: those of one range of one grouping.

    Raises:
      StorageError: the private root cannot be written.
    """
    name = groups_name(grouping, part, virtual_clients)
    data = encode_groups(pieces, groups_in_file(part, virtual_clients))
    place.store.write(f"{USERS}/{name}", data)
    return name, sha256_hex(data), 0, 0


def write_files(place: Place, kind: str, files: Iterable[Written]) -> None:
    """Writes the list of the files of a folder, for the driver to pick up: files, not users."""
    place.store.write(f"{WORK}/{kind}.json", canonical_json(sorted(map(list, files))))


def write_rejects(
    place: Place, shard: int, shards: int, rows: Iterable[tuple[Sequence[str], int]]
) -> None:
    """Writes one shard of the rejects as Parquet: reason, user_id, class, image, times. Raw.

    Duplicates are found late; their user and class are keyed hashes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("reason", "user_id", "class", "image")
    ordered = sorted((tuple(row), times) for row, times in rows)
    columns = list(zip(*(row for row, _ in ordered), strict=True)) or [()] * len(names)
    table = pa.table({name: pa.array(list(column), pa.string()) for name, column in
                      zip(names, columns, strict=True)})  # fmt: skip
    table = table.append_column("times", pa.array([times for _, times in ordered], pa.int64()))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    name = f"{REJECTS}/rejects-{shard:05d}-of-{shards:05d}.parquet"
    place.store.write(name, sink.getvalue())


def write_counts(place: Place, counts: dict[str, int]) -> None:
    """Writes the private counts of the whole pass, for the driver to pick up."""
    place.store.write(COUNTS, canonical_json(dict(sorted(counts.items()))))


# ---- the driver's part --------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """One finished folder."""

    manifest: JsonFields
    digest: str
    """As `artifacts.tree_digest` of the folder."""


def publish(place: Place, kind: str, config: RunConfig, header: JsonFields) -> Published:
    """Writes, last of all, the Raw manifest of a folder whose files are there.

    Raises:
      StorageError: a file is missing, or the private root cannot be written.
      Superseded: the step was started again meanwhile.
    """
    place.token.check()
    store = place.store
    partition = config.partition
    files: list[Written] = []
    if store.exists(f"{WORK}/{kind}.json"):
        files = [tuple(file) for file in json.loads(store.read(f"{WORK}/{kind}.json"))]
    shards = [file for file in files if file[0].endswith(".arrayrecord")]
    groups = partition.groupings * group_files(partition.virtual_clients) if kind == USERS else 0
    if len(shards) != partition.shards or len(files) != 2 * partition.shards + groups:
        raise StorageError(
            f"a file of {kind} was not written; its Beam worker stopped. Run the step again"
        )
    manifest: dict[str, ToJson] = {
        "schema": STORE_SCHEMA,
        **header,
        "image_size": config.model.image_size,
        "channels": config.model.channels,
        "shards": [
            {"name": name, "users": users, "images": images, "sha256": digest}
            for name, digest, users, images in shards
        ],
    }
    if kind == USERS:
        manifest["virtual_clients"] = partition.virtual_clients
        manifest["groupings"] = partition.groupings
    text = json.dumps(manifest, sort_keys=True, indent=1).encode() + b"\n"
    store.write(f"{kind}/manifest.json", text)
    digests = {name: digest for name, digest, _, _ in files}
    return Published(manifest, json_digest({**digests, "manifest.json": sha256_hex(text)}))


def read_counts(root: str) -> dict[str, int]:
    """The private counts of the pass."""
    return json.loads(open_store(root).read(COUNTS))


def drop_work(place: Place) -> None:
    """Deletes the work folder of a finished pass, except its fencing tokens."""
    _delete(place, (WORK,))


def run_root(private_root: str, run_id: str) -> str:
    """Where the Raw folders of a run are; a local one is made, and closed to other accounts."""
    root = join(private_root, run_id)
    root = root if "://" in root else str(Path(root).absolute())
    folder = open_store(root).local_root
    if folder is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"the private folder {folder} cannot be made: {error.strerror}; name a folder "
                "that may be written"
            ) from error
    return root
