"""Index of virtual clients: the users of each group, for every grouping. Raw.

A file has a range of the groups of one grouping, and for each group the shard and row of its users.
Workers write these files in parallel without knowing the number of users. Readers map them into
memory and read only the pages of the requested groups.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedemb.data.user_layout import (
    GROUPS_PER_FILE,
    GROUPS_SCHEMA,
    Shard,
    group_files,
    groups_in_file,
    groups_name,
    index_name,
    read_manifest,
)
from fedemb.data.verified_folder import VerifiedFolder
from fedemb.errors import ArtifactError

_OPEN_FILES = 256
_PIECE = 1 << 18

GroupPiece = tuple[int, np.ndarray, np.ndarray]
"""Some users of one shard: its number, their groups counted from the first of a file (uint32), and
their rows in the shard, ascending within a group (uint32)."""


def damaged(name: str, what: str) -> ArtifactError:
    """Returns the error for a file that partition_users must write again."""
    return ArtifactError(f"{name} {what}; run partition_users again with this version")


class GroupIndex:
    """Users of each virtual client, for every grouping. Thread-safe.

    Opening reads only the manifest. User keys take 8 bytes per user and are read at first use; only
    mechanisms that sample users need them.
    """

    def __init__(self, folder: VerifiedFolder):
        """Opens a folder of users.

        Raises:
          ArtifactError: the folder is incomplete, has no groups, or has another schema version.
        """
        self._path = folder.path
        manifest = read_manifest(self._path)
        if "virtual_clients" not in manifest or "groupings" not in manifest:
            raise damaged(self._path.name, "holds no groups")
        self.virtual_clients = manifest["virtual_clients"]
        """Virtual clients per grouping (G)."""
        self.groupings = manifest["groupings"]
        """Independent groupings (R)."""
        self._shards = manifest["shards"]
        sizes = [shard["users"] for shard in self._shards]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.user_count = int(self._starts[-1])
        """Number of users. Private."""
        self._lock = threading.Lock()
        self._file = lru_cache(_OPEN_FILES)(self._map)

    @classmethod
    def load(cls, folder: VerifiedFolder) -> GroupIndex:
        """Opens the index; see `__init__`."""
        return cls(folder)

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Returns the keyed hashes of the users, uint64 [users], ascending: the order of rows."""
        return read_index(self._path, self._shards, "user_key", np.uint64)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Returns the rows of the users of one virtual client, int64 [members], ascending.

        Raises:
          IndexError: the grouping or group does not exist.
          ArtifactError: the file of the group is missing or damaged.
        """
        if not (0 <= grouping < self.groupings and 0 <= group < self.virtual_clients):
            raise IndexError(f"no group {group} in grouping {grouping}")
        part, place = divmod(group, GROUPS_PER_FILE)
        offsets, shards, rows = self._part(grouping, part)
        chosen = slice(int(offsets[place]), int(offsets[place + 1]))
        held, row = shards[chosen], rows[chosen]
        if np.any(held >= len(self._shards)) or np.any(row >= np.diff(self._starts)[held]):
            name = groups_name(grouping, part, self.virtual_clients)
            raise damaged(name, "names users that do not exist")
        return self._starts[held] + row

    def group_sizes(self, grouping: int) -> np.ndarray:
        """Returns the number of users of each virtual client, int64 [virtual_clients]. Private."""
        parts = range(group_files(self.virtual_clients))
        sizes = [np.diff(self._part(grouping, part)[0]) for part in parts]
        return np.concatenate(sizes).astype(np.int64)

    def _part(self, grouping: int, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with self._lock:
            return self._file(grouping, part)

    def _map(self, grouping: int, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns memory maps: offsets of the groups, and shards and rows of their users."""
        import pyarrow as pa

        name = groups_name(grouping, part, self.virtual_clients)
        try:
            file = pa.ipc.open_file(pa.memory_map(str(self._path / name)))
            found = (file.schema.metadata or {}).get(b"fedemb", b"").decode()
            if found != GROUPS_SCHEMA:
                raise damaged(name, f"has schema {found!r}, expected {GROUPS_SCHEMA!r}")
            batch = file.get_batch(0)
            batch.validate(full=True)
            shards, rows = batch.columns
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:
            raise damaged(name, "is missing or damaged") from error
        if batch.num_rows != groups_in_file(part, self.virtual_clients):
            raise damaged(name, "does not fit its header")
        return shards.offsets.to_numpy(), shards.values.to_numpy(), rows.values.to_numpy()


def split_groups(shard: int, groups: np.ndarray) -> list[tuple[int, GroupPiece]]:
    """Splits the users of a shard by the file of their group.

    Args:
      shard: number of the shard.
      groups: group of every row of the shard in one grouping, uint32 [rows].

    Returns:
      Number and content of each file with at least one user of the shard.
    """
    rows = np.argsort(groups, kind="stable").astype(np.uint32)
    ordered = groups[rows]
    parts = ordered // GROUPS_PER_FILE
    cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(rows)]
    return [
        (int(parts[first]), (shard, ordered[first:last] % GROUPS_PER_FILE, rows[first:last]))
        for first, last in pairwise(cuts)
        if last > first
    ]


def encode_groups(pieces: Iterable[GroupPiece], groups: int) -> bytes:
    """Returns a file of groups (Arrow IPC); the bytes do not depend on the order of the pieces.

    Args:
      pieces: results of `split_groups` for this file, one per shard.
      groups: number of groups in the file.
    """
    import pyarrow as pa

    ordered = sorted(pieces, key=lambda piece: piece[0])
    numbers = np.array([shard for shard, _, _ in ordered], np.uint16)
    shards = np.repeat(numbers, [len(rows) for _, _, rows in ordered])
    none = np.empty(0, np.uint32)
    members = np.concatenate([none, *(group for _, group, _ in ordered)])
    rows = np.concatenate([none, *(rows for _, _, rows in ordered)])
    order = np.argsort(members, kind="stable")
    offsets = np.zeros(groups + 1, np.int32)
    np.cumsum(np.bincount(members, minlength=groups), out=offsets[1:])
    columns = {"shard": shards[order], "row": rows[order]}
    lists = [pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns.values()]
    fields = [pa.field(name, column.type) for name, column in zip(columns, lists, strict=True)]
    schema = pa.schema(fields, {"fedemb": GROUPS_SCHEMA})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(lists, schema=schema))
    return sink.getvalue()


def encode_index(keys: np.ndarray, images: np.ndarray) -> bytes:
    """Returns the index file of a shard (Parquet).

    Args:
      keys: user keys in the order of the records, uint64 [users].
      images: number of images per user, uint32 [users].
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field("user_key", pa.uint64(), False), pa.field("images", pa.uint32(), False)]
    sink = io.BytesIO()
    table = pa.table([keys, images], schema=pa.schema(fields))
    pq.write_table(table, sink, compression="none", use_dictionary=False)
    return sink.getvalue()


def read_index(folder: Path, shards: Sequence[Shard], column: str, kind: type) -> np.ndarray:
    """Reads a column of the indexes of all shards, [users].

    Args:
      folder: folder of the users.
      shards: field `shards` of the manifest.
      column: `user_key` or `images`.
      kind: type of the result.

    Raises:
      ArtifactError: an index is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = np.empty(sum(shard["users"] for shard in shards), kind)
    start = 0
    for shard in shards:
        name = index_name(shard["name"])
        end = start + shard["users"]
        try:
            file = pq.ParquetFile(folder / name, buffer_size=_PIECE, pre_buffer=False)
            for batch in file.iter_batches(_PIECE, columns=[column]):
                piece = batch.column(column).to_numpy()
                values[start : start + len(piece)] = piece
                start += len(piece)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise damaged(name, "is missing or damaged") from error
        if start != end:
            raise damaged(name, "does not fit the manifest")
    return values
