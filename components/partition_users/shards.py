"""Writing the partition: shards by workers, index and manifest by the driver, manifest last.

Every file is written under a temporary name and renamed, or put as a whole object, with bytes that
depend on its content alone: a shard written twice, by a retry or a straggler, is the same shard. A
folder without its `manifest.json` is incomplete, and readers say so.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.fedemb.artifacts import canonical_json, json_digest, sha256_hex
from components.fedemb.client_data import STORE_SCHEMA, WRITER_OPTIONS, shard_name
from components.fedemb.config import RunConfig
from components.fedemb.errors import StorageError
from components.fedemb.group_index import write_groups
from components.fedemb.storage import Store, join, open_store
from components.partition_users.hashing import Hasher

USERS, EVALUATION, REJECTS, WORK = "users", "evaluation", "rejects", "partition"
COUNTS = f"{WORK}/counts.json"

UserRow = tuple[bytes, int, bytes]
"""User key, images, encoded user record."""


def clean(root: str) -> None:
    """Deletes what an earlier attempt of the same run left, manifests first.

    Raises:
      StorageError: the private root cannot be written.
    """
    _delete(root, (USERS, EVALUATION, REJECTS, WORK))


def _delete(root: str, kinds: Sequence[str]) -> None:
    store = open_store(root)
    names = [name for kind in kinds for name in store.list(f"{kind}/")]
    for name in sorted(names, key=lambda name: not name.endswith("manifest.json")):
        store.delete(name)
    if store.local_root is not None:
        for kind in kinds:  # hidden leftovers and empty folders
            shutil.rmtree(store.local_root / kind, ignore_errors=True)


def write_shard(
    root: str,
    kind: str,
    shard: int,
    *,
    rows: Iterable[UserRow],
    hasher: Hasher,
    config: RunConfig,
) -> None:
    """Writes one shard of users and, in the work folder, its piece of the index.

    Args:
      root: address below which the folders of the run are.
      kind: `users` or `evaluation`.
      shard: number of the hash range.
      rows: its users, in any order.
      hasher: gives the groups.
      config: partition section is used.

    Raises:
      StorageError: disk full or no permission; no half-written shard stays.
    """
    ordered = sorted(rows)
    partition = config.partition
    name = shard_name(kind, shard, partition.shards)
    data = _array_record([record for _, _, record in ordered], name)
    keys = [key for key, _, _ in ordered]
    index: dict[str, np.ndarray] = {
        "keys": np.frombuffer(b"".join(keys), ">u8").astype(np.uint64),
        "images": np.array([images for _, images, _ in ordered], np.uint32),
        "sha256": np.array(sha256_hex(data)),
    }
    if kind == USERS:
        groups = hasher.groups(keys, partition.groupings, partition.virtual_clients)
        index |= {f"grouping_{number}": row for number, row in enumerate(groups)}
    piece = io.BytesIO()
    np.savez(piece, **index)  # pyright: ignore[reportArgumentType]
    store = open_store(root)
    store.write(f"{kind}/{name}", data)
    store.write(f"{WORK}/{kind}-{shard:05d}.npz", piece.getvalue())


def _array_record(records: Sequence[bytes], name: str) -> bytes:
    from array_record.python.array_record_module import ArrayRecordWriter

    try:
        with tempfile.TemporaryDirectory(prefix="fedemb-") as folder:
            path = Path(folder, name)
            writer = ArrayRecordWriter(str(path), WRITER_OPTIONS)
            for record in records:
                writer.write(record)
            writer.close()
            return path.read_bytes()
    except (OSError, RuntimeError) as error:  # the writer reports a full disk as RuntimeError
        raise StorageError(
            f"could not write {name} to the temporary folder; free space there (TMPDIR), then run "
            "again"
        ) from error


def write_rejects(root: str, shard: int, shards: int, rows: Iterable[Sequence[str]]) -> None:
    """Writes one shard of the rejects as Parquet: reason, user_id, class, image. Raw.

    Of duplicates, which are found late, user and class are their keyed hashes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("reason", "user_id", "class", "image")
    columns = list(zip(*sorted(map(tuple, rows)), strict=True)) or [()] * len(names)
    table = pa.table({name: pa.array(list(column), pa.string()) for name, column in
                      zip(names, columns, strict=True)})  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(table, sink)
    name = f"{REJECTS}/rejects-{shard:05d}-of-{shards:05d}.parquet"
    open_store(root).write(name, sink.getvalue())


def write_counts(root: str, counts: dict[str, int]) -> None:
    """Writes the private counts of the whole pass, for the driver to pick up."""
    open_store(root).write(COUNTS, canonical_json(dict(sorted(counts.items()))))


# ---- the public set -----------------------------------------------------------------------------


def write_public_digests(root: str, shard: int, digests: Iterable[bytes]) -> None:
    """Writes a sorted range of the digests of public images, as an array to be mapped."""
    sink = io.BytesIO()
    np.save(sink, np.frombuffer(b"".join(sorted(set(digests))), ">u8").astype(np.uint64))
    open_store(root).write(f"{WORK}/public-{shard:05d}.npy", sink.getvalue())


class PublicSet:
    """Digests of the public images, in files mapped into memory: a lookup touches a few pages."""

    def __init__(self, root: str, shards: int):
        """Opens the files below `root`; remote ones are copied to a temporary folder first."""
        store = open_store(root)
        self._copies = tempfile.TemporaryDirectory(prefix="fedemb-")
        self._shards = shards
        names = [f"{WORK}/public-{shard:05d}.npy" for shard in range(shards)]
        self._ranges = [np.load(self._local(store, name), mmap_mode="r") for name in names]

    def _local(self, store: Store, name: str) -> Path:
        if store.local_root is not None:
            return store.local_root / name
        path = Path(self._copies.name, Path(name).name)
        path.write_bytes(store.read(name))
        return path

    def __contains__(self, digest: bytes) -> bool:
        """Whether an image with this digest is public. By 64 bits: a false hit drops one image."""
        word = int.from_bytes(digest[:8], "big")
        values = self._ranges[word * self._shards >> 64]
        place = int(np.searchsorted(values, np.uint64(word)))
        return place < len(values) and int(values[place]) == word


# ---- the driver's part --------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """One finished folder."""

    manifest: dict[str, Any]
    digest: str
    """As `artifacts.tree_digest` of the folder."""


def publish(root: str, kind: str, config: RunConfig, header: dict[str, Any]) -> Published:
    """Writes index, groups and, last of all, the Raw manifest of a folder whose shards are there.

    Memory: 12 bytes per user, and 16 more while one grouping is sorted.

    Raises:
      StorageError: a shard is missing, or the private root cannot be written.
    """
    store = open_store(root)
    shards = config.partition.shards
    try:
        pieces = [
            np.load(io.BytesIO(store.read(f"{WORK}/{kind}-{shard:05d}.npz")))
            for shard in range(shards)
        ]
    except FileNotFoundError as error:
        raise StorageError(
            f"a shard of {kind} was not written; its Beam worker stopped. Run the step again"
        ) from error
    keys = np.concatenate([piece["keys"] for piece in pieces])
    images = np.concatenate([piece["images"] for piece in pieces])
    manifest = {
        "schema": STORE_SCHEMA,
        **header,
        "image_size": config.model.image_size,
        "channels": config.model.channels,
        "shards": [
            {
                "name": shard_name(kind, shard, shards),
                "users": len(piece["keys"]),
                "images": int(piece["images"].sum()),
                "sha256": str(piece["sha256"]),
            }
            for shard, piece in enumerate(pieces)
        ],
    }
    digests = {shard["name"]: shard["sha256"] for shard in manifest["shards"]}
    with tempfile.TemporaryDirectory(prefix="fedemb-") as folder:
        files = {"index.parquet": Path(folder, "index.parquet")}
        _write_index(files["index.parquet"], keys, images)
        if kind == USERS:
            files["groups.parquet"] = Path(folder, "groups.parquet")
            write_groups(
                files["groups.parquet"],
                lambda number: np.concatenate([piece[f"grouping_{number}"] for piece in pieces]),
                groupings=config.partition.groupings,
                virtual_clients=config.partition.virtual_clients,
                users=len(keys),
            )
        for name, path in files.items():
            data = path.read_bytes()
            digests[name] = sha256_hex(data)
            store.write(f"{kind}/{name}", data)
    text = json.dumps(manifest, sort_keys=True, indent=1).encode() + b"\n"
    digests["manifest.json"] = sha256_hex(text)
    store.write(f"{kind}/manifest.json", text)
    return Published(manifest, json_digest(digests))


def _write_index(path: Path, keys: np.ndarray, images: np.ndarray) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field("user_key", pa.uint64(), False), pa.field("images", pa.uint32(), False)]
    table = pa.table([keys, images], schema=pa.schema(fields))
    pq.write_table(table, path, compression="none", use_dictionary=False)


def read_counts(root: str) -> dict[str, int]:
    """The private counts of the pass."""
    return json.loads(open_store(root).read(COUNTS))


def drop_work(root: str) -> None:
    """Deletes the work folder of a finished pass."""
    _delete(root, (WORK,))


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
