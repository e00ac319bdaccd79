"""Reading what `partition_users` wrote: users by row, groups by number, examples as arrays.

Layout of a folder (`users/` or `evaluation/`):

    manifest.json                     schema `fedemb/user_store/1`, private counts, digests
    users-00000-of-00004.arrayrecord  user records, sorted by user key over all shards
    index.parquet                     user_key, images: one line per row
    groups.parquet                    `users/` only: one row group per grouping, sorted by group

Rows are global: shard after shard. Everything here is Raw.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from components.fedemb.artifacts import read_json
from components.fedemb.errors import ArtifactError
from components.fedemb.pixels import decode_pngs
from components.fedemb.records import UserRecord, decode_user

STORE_SCHEMA = "fedemb/user_store/1"
GROUPS_SCHEMA = "fedemb/groups/1"
WRITER_OPTIONS = "group_size:1,uncompressed"
"""One record per chunk: a random read touches nothing else. PNGs do not shrink further."""
_PIECE = 1 << 18
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def shard_name(kind: str, shard: int, shards: int) -> str:
    """File name of a shard, e.g. `users-00000-of-00004.arrayrecord`."""
    return f"{kind}-{shard:05d}-of-{shards:05d}.arrayrecord"


def _damaged(name: str, what: str) -> ArtifactError:
    return ArtifactError(f"{name} {what}; run partition_users again with this version")


class UserStore:
    """Random access to user records over sharded ArrayRecord files. Safe to use from threads."""

    def __init__(self, path: Path):
        """Opens a folder; reads its manifest and index, no images.

        Args:
          path: `users/` or `evaluation/` below the private root.

        Raises:
          ArtifactError: incomplete, of another schema version, or damaged.
        """
        self.path = Path(path)
        self.manifest: dict[str, Any] = read_json(self.path / "manifest.json", STORE_SCHEMA)
        self.image_size: int = self.manifest["image_size"]
        self.channels: int = self.manifest["channels"]
        sizes = [shard["users"] for shard in self.manifest["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of users. Private."""
        return int(self._starts[-1])

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Keyed hashes of the users, uint64 [users], ascending: the order of rows."""
        return _read_index(self.path / "index.parquet", len(self), {"user_key": np.uint64})[
            "user_key"
        ]

    @cached_property
    def image_counts(self) -> np.ndarray:
        """Images of each user, uint32 [users]."""
        return _read_index(self.path / "index.parquet", len(self), {"images": np.uint32})["images"]

    def read(self, rows: Sequence[int] | np.ndarray) -> list[UserRecord]:
        """Reads users by row, in the order asked for.

        Raises:
          IndexError: a row that does not exist.
          ArtifactError: a shard is missing or damaged.
        """
        wanted = np.asarray(rows, np.int64)
        if wanted.size == 0:
            return []
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"row {int(wanted.max())} of {len(self)} users")
        records: list[UserRecord | None] = [None] * len(wanted)
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(shards):
            places = np.flatnonzero(shards == shard)
            local = (wanted[places] - self._starts[shard]).tolist()
            with self._lock:
                reader = self._reader(int(shard))
                try:
                    data = reader.read(local)
                except (RuntimeError, IndexError) as error:
                    raise _damaged(self._name(int(shard)), "is damaged") from error
            for place, one in zip(places.tolist(), data, strict=True):
                records[place] = decode_user(one)
        return [record for record in records if record is not None]

    def _name(self, shard: int) -> str:
        return self.manifest["shards"][shard]["name"]

    def _reader(self, shard: int) -> Any:
        reader = self._readers.get(shard)
        if reader is None:
            from array_record.python.array_record_module import ArrayRecordReader

            reader = ArrayRecordReader(str(self.path / self._name(shard)), _READER_OPTIONS)
            expected = int(self._starts[shard + 1] - self._starts[shard])
            if not reader.ok() or reader.num_records() != expected:
                raise _damaged(self._name(shard), "is missing, cut or of another run")
            self._readers[shard] = reader
        return reader


class GroupIndex:
    """Which users are in which virtual client, for every grouping.

    One grouping is read at a time and takes 4 bytes per user and 8 per group; the one used last is
    kept. User keys take 8 bytes per user and are read when first asked for.
    """

    def __init__(self, path: Path):
        """Opens `groups.parquet`, given it or its folder; reads no group yet.

        Raises:
          ArtifactError: missing, damaged or of another schema version.
        """
        path = Path(path)
        self._path = path / "groups.parquet" if path.is_dir() else path
        self._file = _open_parquet(self._path)
        found = (self._file.schema_arrow.metadata or {}).get(b"fedemb", b"{}")
        header = json.loads(found)
        if header.get("schema") != GROUPS_SCHEMA:
            raise _damaged(
                self._path.name, f"has schema {header.get('schema')!r}, expected {GROUPS_SCHEMA!r}"
            )
        self.virtual_clients: int = header["virtual_clients"]
        """Virtual clients per grouping (G)."""
        self.groupings: int = header["groupings"]
        """Independent groupings (R)."""
        self.user_count: int = header["users"]
        """Number of users. Private."""
        self._lock = threading.Lock()
        self._loaded: tuple[int, np.ndarray, np.ndarray] | None = None

    @classmethod
    def load(cls, path: Path) -> GroupIndex:
        """Opens the index; see `__init__`."""
        return cls(path)

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Keyed hashes of the users, uint64 [users], ascending: the order of rows."""
        path = self._path.parent / "index.parquet"
        return _read_index(path, self.user_count, {"user_key": np.uint64})["user_key"]

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Rows of the users of one virtual client, int64 [members], ascending.

        Raises:
          IndexError: no such grouping or group.
        """
        if not (0 <= grouping < self.groupings and 0 <= group < self.virtual_clients):
            raise IndexError(f"no group {group} in grouping {grouping}")
        rows, starts = self._grouping(grouping)
        return rows[starts[group] : starts[group + 1]].astype(np.int64)

    def group_sizes(self, grouping: int) -> np.ndarray:
        """Users of each virtual client, int64 [virtual_clients]. Private."""
        return np.diff(self._grouping(grouping)[1])

    def _grouping(self, grouping: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if self._loaded is None or self._loaded[0] != grouping:
                self._loaded = None
                self._loaded = (grouping, *self._read(grouping))
            return self._loaded[1:]

    def _read(self, grouping: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.empty(self.user_count, np.uint32)
        starts = np.zeros(self.virtual_clients + 1, np.int64)
        if self.user_count == 0:
            return rows, starts
        columns = {"group": np.uint32, "row": np.uint32}
        for start, pieces in _read_columns(
            self._file, self.user_count, columns, row_groups=[grouping]
        ):
            rows[start : start + len(pieces["row"])] = pieces["row"]
            first, last = int(pieces["group"][0]), int(pieces["group"][-1])
            if last >= self.virtual_clients:
                raise _damaged(self._path.name, "does not fit its header")
            starts[first + 1 : last + 2] += np.bincount(pieces["group"] - first)
        np.cumsum(starts, out=starts)
        return rows, starts


def write_groups(
    path: Path,
    groups_of: Callable[[int], np.ndarray],
    *,
    groupings: int,
    virtual_clients: int,
    users: int,
) -> None:
    """Writes `groups.parquet`, one grouping at a time, so that memory holds only one.

    Args:
      path: file to write.
      groups_of: gives, for a grouping, the group of every row, uint32 [users].
      groupings: how many there are (R).
      virtual_clients: groups per grouping (G).
      users: number of rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    header = {
        "schema": GROUPS_SCHEMA,
        "virtual_clients": virtual_clients,
        "groupings": groupings,
        "users": users,
    }
    schema = pa.schema(
        [pa.field("group", pa.uint32(), False), pa.field("row", pa.uint32(), False)],
        {"fedemb": json.dumps(header, sort_keys=True)},
    )
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for grouping in range(groupings if users else 0):
            groups = groups_of(grouping)
            rows = np.argsort(groups, kind="stable").astype(np.uint32)
            table = pa.table([groups[rows].astype(np.uint32), rows], schema=schema)
            writer.write_table(table, row_group_size=users)


def load_examples(
    store: UserStore,
    rows: Sequence[int] | np.ndarray,
    *,
    max_examples: int,
    image_size: int,
    channels: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Loads the images of some users as arrays, in an order that is theirs alone.

    If there are too many, every user gives their first image (in keyed-hash order) before any gives
    their second, so that a user with many images does not push others out.

    Args:
      store: the users.
      rows: users of one virtual client; their order does not matter.
      max_examples: examples returned at most.
      image_size: height and width; must be what the store holds.
      channels: 1 or 3; must be what the store holds.

    Returns:
      images: uint8 [examples, image_size, image_size, channels].
      labels: int64 [examples].

    Raises:
      ArtifactError: the store holds images of another size, or is damaged.
    """
    if (store.image_size, store.channels) != (image_size, channels):
        raise ArtifactError(
            f"the users hold images of {store.image_size}x{store.image_size}x{store.channels}, the "
            f"model wants {image_size}x{image_size}x{channels}; run partition_users with this "
            "configuration"
        )
    users = store.read(np.sort(np.asarray(rows, np.int64)))
    places = [(turn, row) for row, user in enumerate(users) for turn in range(len(user.images))]
    if len(places) > max_examples:
        places = sorted(places)[:max_examples]
        places.sort(key=lambda place: (place[1], place[0]))
    images = [users[row].images[turn] for turn, row in places]
    labels = [users[row].labels[turn] for turn, row in places]
    return decode_pngs(images, image_size, channels), np.asarray(labels, np.int64)


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, buffer_size=_PIECE, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path.name, "is missing or damaged") from error


def _read_columns(file: Any, rows: int, columns: dict[str, type], **selection: Any) -> Any:
    """Yields `(start, {column: array})` of pieces, so that no column is twice in memory."""
    import pyarrow as pa

    start = 0
    try:
        for batch in file.iter_batches(_PIECE, columns=list(columns), **selection):
            yield start, {name: batch.column(name).to_numpy() for name in columns}
            start += len(batch)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _damaged("a Parquet file of the users", "is damaged") from error
    if start != rows:
        raise _damaged("a Parquet file of the users", "does not fit its header")


def _read_index(path: Path, users: int, columns: dict[str, type]) -> dict[str, np.ndarray]:
    """Reads columns of `index.parquet`, each [users]."""
    arrays = {name: np.empty(users, kind) for name, kind in columns.items()}
    for start, pieces in _read_columns(_open_parquet(path), users, columns):
        for name, piece in pieces.items():
            arrays[name][start : start + len(piece)] = piece
    return arrays
