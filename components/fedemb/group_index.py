"""The index of virtual clients: which users are in which group, for every grouping.

`groups.parquet` has one row group per grouping, sorted by group; `index.parquet` has one line per
user. Both are read in pieces, so that no column is twice in memory: at a million groups the index
takes tens of megabytes. Raw.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from components.fedemb.errors import ArtifactError

GROUPS_SCHEMA = "fedemb/groups/1"
_PIECE = 1 << 18


def damaged(name: str, what: str) -> ArtifactError:
    """The error for a file that partition_users must write again."""
    return ArtifactError(f"{name} {what}; run partition_users again with this version")


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
        self._file = _open(self._path)
        found = (self._file.schema_arrow.metadata or {}).get(b"fedemb", b"{}")
        header = json.loads(found)
        if header.get("schema") != GROUPS_SCHEMA:
            raise damaged(
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
        return read_index(path, self.user_count, {"user_key": np.uint64})["user_key"]

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
        columns = ["group", "row"]
        for start, pieces in _pieces(self._file, self.user_count, columns, row_groups=[grouping]):
            rows[start : start + len(pieces["row"])] = pieces["row"]
            first, last = int(pieces["group"][0]), int(pieces["group"][-1])
            if last >= self.virtual_clients:
                raise damaged(self._path.name, "does not fit its header")
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


def _open(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, buffer_size=_PIECE, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise damaged(path.name, "is missing or damaged") from error


def _pieces(
    file: Any, rows: int, columns: list[str], **selection: Any
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yields `(start, {column: array})` of pieces."""
    import pyarrow as pa

    start = 0
    try:
        for batch in file.iter_batches(_PIECE, columns=columns, **selection):
            yield start, {name: batch.column(name).to_numpy() for name in columns}
            start += len(batch)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged("an index of the users", "is damaged") from error
    if start != rows:
        raise damaged("an index of the users", "does not fit its header")


def read_index(path: Path, users: int, columns: Mapping[str, type]) -> dict[str, np.ndarray]:
    """Reads columns of `index.parquet`, each [users]."""
    arrays = {name: np.empty(users, kind) for name, kind in columns.items()}
    for start, pieces in _pieces(_open(path), users, list(columns)):
        for name, piece in pieces.items():
            arrays[name][start : start + len(piece)] = piece
    return arrays
