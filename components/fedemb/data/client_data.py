"""Reads the output of `partition_users`: users by row, groups by number, examples as arrays.

Row numbers are global over all shards in order.

Layout of a folder of users: file names and sizes shared by writers and readers.

    manifest.json                       schema `fedemb/user_store/1`, private counts, digests
    users-00000-of-00004.arrayrecord    user records, sorted by user key over all shards
    users-00000-of-00004.parquet        user_key, images: one line per record of the shard
    groups-00003-00000-of-00062.arrow   `users/` only: a range of the groups of grouping 3

Public constants limit the size of each file: `partition.shards` for a shard, `GROUPS_PER_FILE` for
a file of groups. Everything here is Raw.

Private folder whose content matches the commitment in the ledger.

`UserStore` and `GroupIndex` open only verified folders, so a step cannot read unchecked users.
Steps get a verified folder from `fedemb.runtime.private_inputs.open_private`.

A file has a range of the groups of one grouping, and for each group the shard and row of its users.
Workers write these files in parallel without knowing the number of users. Readers map them into
memory and read only the pages of the requested groups.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

import numpy as np

from fedemb.data.pixels import decode_pngs
from fedemb.data.records import UserRecord, decode_user
from fedemb.errors import ArtifactError, PlanMismatch, StorageError
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.document import read_json
from fedemb.keys import commit_to_users

if TYPE_CHECKING:
    from array_record.python.array_record_module import ArrayRecordReader

STORE_SCHEMA = "fedemb/user_store/1"
GROUPS_SCHEMA = "fedemb/groups/1"
WRITER_OPTIONS = "group_size:1,uncompressed"
"""One record per chunk for random reads; PNGs cannot be compressed further."""
GROUPS_PER_FILE = 1 << 14
"""Number of groups per file: about 3 MB at 32 users per group."""


class Shard(TypedDict):
    """A shard of user records in the manifest of its folder."""

    name: str
    users: int


class FolderManifest(TypedDict):
    """Fields of `manifest.json` that readers of a folder of users need. Raw."""

    image_size: int
    channels: int
    shards: list[Shard]
    virtual_clients: NotRequired[int]
    """Virtual clients per grouping (G); only in `users/`."""
    groupings: NotRequired[int]
    """Independent groupings (R); only in `users/`."""


def read_manifest(folder: Path) -> FolderManifest:
    """Reads the manifest of a verified folder of users.

    Raises:
      ArtifactError: the manifest is missing or has another version.
    """
    return cast("FolderManifest", read_json(folder / "manifest.json", STORE_SCHEMA))


def shard_name(kind: str, shard: int, shards: int) -> str:
    """Returns the file name of a shard, e.g. `users-00000-of-00004.arrayrecord`."""
    return f"{kind}-{shard:05d}-of-{shards:05d}.arrayrecord"


def index_name(shard: str) -> str:
    """Returns the name of the index file of a shard.

    >>> index_name("users-00000-of-00004.arrayrecord")
    'users-00000-of-00004.parquet'
    """
    return shard.removesuffix(".arrayrecord") + ".parquet"


def group_files(virtual_clients: int) -> int:
    """Returns the number of files of one grouping."""
    return -(-virtual_clients // GROUPS_PER_FILE)


def groups_name(grouping: int, part: int, virtual_clients: int) -> str:
    """Returns the name of a file of groups.

    >>> groups_name(3, 0, 1_000_000)
    'groups-00003-00000-of-00062.arrow'
    """
    return f"groups-{grouping:05d}-{part:05d}-of-{group_files(virtual_clients):05d}.arrow"


def groups_in_file(part: int, virtual_clients: int) -> int:
    """Returns the number of groups in the file `part` of a grouping.

    >>> groups_in_file(0, 1000), groups_in_file(61, 1_000_000)
    (1000, 576)
    """
    return min(GROUPS_PER_FILE, virtual_clients - part * GROUPS_PER_FILE)


_PIECE = 1 << 20
"""Number of bytes read at once."""


@dataclass(frozen=True)
class FolderCommitment:
    """Commitment in the ledger to one private folder of one attempt."""

    run_id: str
    attempt: int
    value: str
    """Keyed commitment, see `keys.commit_to_users`."""
    key: bytes = field(repr=False)
    """Commitment key of the policy."""


@dataclass(frozen=True)
class VerifiedFolder:
    """Copy of a folder that matched its commitment; made by `verified_copy`."""

    path: Path
    """Path of the copy. Raw."""


@contextmanager
def verified_copy(source: Path, commitment: FolderCommitment) -> Iterator[VerifiedFolder]:
    """Yields a copy of a folder in a temporary folder that only this user can open.

    The digest is computed from the bytes that are written to the copy. Changing, replacing or
    renaming the folder afterwards changes nothing that a step reads. A killed process leaves the
    copy behind, see docs/how_to/delete_a_user.md.

    Raises:
      PlanMismatch: the folder has other or additional content.
      StorageError: the folder cannot be copied.
    """
    with tempfile.TemporaryDirectory(prefix="fedemb-private-") as scratch:
        copy = Path(scratch, source.name)
        try:
            digests = _copied(source, copy)
        except OSError as error:
            raise StorageError(
                f"{source.name}/ of run {commitment.run_id} cannot be copied to {scratch}: "
                f"{error.strerror}. The copy needs as much space as the folder; set TMPDIR"
            ) from error
        of_people = commitment.run_id, commitment.attempt, json_digest(digests)
        if commit_to_users(commitment.key, *of_people) != commitment.value:
            raise PlanMismatch(
                f"{source.name}/ of run {commitment.run_id} is not the folder the run is bound to "
                "in the ledger: it was changed or replaced, or another storage.private_root is "
                "named. Restore the folder that partition_users wrote, or start a run with a new id"
            )
        yield VerifiedFolder(copy)


def _copied(source: Path, copy: Path) -> dict[str, str]:
    """Copies all files; returns the digests of the written bytes by name, as `tree_digests`."""
    digests: dict[str, str] = {}
    copy.mkdir()
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(source)
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with (copy / name).open("xb") as target:
            for piece in _pieces(path):
                digest.update(piece)
                target.write(piece)
        digests[name.as_posix()] = digest.hexdigest()
    return digests


def _pieces(path: Path) -> Iterator[bytes]:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise PlanMismatch(f"{path.name} in the private root is not a regular file. Remove it.")
        while piece := file.read(_PIECE):
            yield piece


_OPEN_FILES = 256
_INDEX_PIECE = 1 << 18

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
        with self._lock:
            offsets, shards, rows = self._file(grouping, part)
        chosen = slice(int(offsets[place]), int(offsets[place + 1]))
        held, row = shards[chosen], rows[chosen]
        if np.any(held >= len(self._shards)) or np.any(row >= np.diff(self._starts)[held]):
            name = groups_name(grouping, part, self.virtual_clients)
            raise damaged(name, "names users that do not exist")
        return self._starts[held] + row

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
            file = pq.ParquetFile(folder / name, buffer_size=_INDEX_PIECE, pre_buffer=False)
            for batch in file.iter_batches(_INDEX_PIECE, columns=[column]):
                piece = batch.column(column).to_numpy()
                values[start : start + len(piece)] = piece
                start += len(piece)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise damaged(name, "is missing or damaged") from error
        if start != end:
            raise damaged(name, "does not fit the manifest")
    return values


_PIECE_IMAGES = 1024
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class UserStore:
    """Random access to user records over sharded ArrayRecord files. Safe to use from threads."""

    def __init__(self, folder: VerifiedFolder):
        """Opens a folder; reads its manifest and index, no images.

        Args:
          folder: `users/` or `evaluation/` of a run.

        Raises:
          ArtifactError: the folder is incomplete, damaged, or of another schema version.
        """
        self.path = folder.path
        self.manifest = read_manifest(self.path)
        self.image_size = self.manifest["image_size"]
        self.channels = self.manifest["channels"]
        sizes = [shard["users"] for shard in self.manifest["shards"]]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._readers: dict[int, ArrayRecordReader] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of users. Private."""
        return int(self._starts[-1])

    @cached_property
    def user_keys(self) -> np.ndarray:
        """Returns the keyed hashes of the users, uint64 [users], ascending: the order of rows."""
        return read_index(self.path, self.manifest["shards"], "user_key", np.uint64)

    @cached_property
    def image_counts(self) -> np.ndarray:
        """Returns the number of images of each user, uint32 [users]."""
        return read_index(self.path, self.manifest["shards"], "images", np.uint32)

    def read(self, rows: Sequence[int] | np.ndarray) -> list[UserRecord]:
        """Reads users by row, in the requested order.

        Raises:
          IndexError: a row does not exist.
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
                    raise damaged(self._name(int(shard)), "is damaged") from error
            for place, one in zip(places.tolist(), data, strict=True):
                records[place] = decode_user(one)
        return [record for record in records if record is not None]

    def read_in_pieces(self, rows: np.ndarray) -> Iterator[list[UserRecord]]:
        """Reads users by row, in pieces of about `_PIECE_IMAGES` images; see `read`."""
        pieces = np.cumsum(self.image_counts[rows], dtype=np.int64) // _PIECE_IMAGES
        for piece in np.split(rows, np.flatnonzero(np.diff(pieces)) + 1):
            yield self.read(piece)

    def _name(self, shard: int) -> str:
        return self.manifest["shards"][shard]["name"]

    def _reader(self, shard: int) -> ArrayRecordReader:
        reader = self._readers.get(shard)
        if reader is None:
            from array_record.python.array_record_module import ArrayRecordReader

            reader = ArrayRecordReader(str(self.path / self._name(shard)), _READER_OPTIONS)
            expected = int(self._starts[shard + 1] - self._starts[shard])
            if not reader.ok() or reader.num_records() != expected:
                raise damaged(self._name(shard), "is missing, cut or of another run")
            self._readers[shard] = reader
        return reader


def load_examples(
    store: UserStore,
    rows: Sequence[int] | np.ndarray,
    *,
    max_examples: int,
    image_size: int,
    channels: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Loads the images of users as arrays, in an order that does not depend on other users.

    If there are more than `max_examples`, `choose_examples` selects them. The images of a user are
    in keyed-hash order.

    Args:
      store: the users.
      rows: users of one virtual client; their order does not matter.
      max_examples: maximum number of examples returned.
      image_size: height and width in pixels; must match the store.
      channels: 1 or 3; must match the store.

    Returns:
      images: uint8 [examples, image_size, image_size, channels].
      labels: int64 [examples].

    Raises:
      ArtifactError: the store has images of another size, or is damaged.
    """
    if (store.image_size, store.channels) != (image_size, channels):
        raise ArtifactError(
            f"The users have images of {store.image_size}x{store.image_size}x{store.channels}, "
            f"and the model expects {image_size}x{image_size}x{channels}. Run partition_users "
            "with this configuration."
        )
    users = store.read(np.sort(np.asarray(rows, np.int64)))
    places = choose_examples([len(user.images) for user in users], max_examples)
    images = [users[row].images[turn] for row, turn in places]
    labels = [users[row].labels[turn] for row, turn in places]
    return decode_pngs(images, image_size, channels), np.asarray(labels, np.int64)


def choose_examples(counts: Sequence[int], max_examples: int) -> list[tuple[int, int]]:
    """Selects the training images of a virtual client that has too many.

    The first image of every user is selected before the second image of any user, so that a user
    with many images does not displace others.

    Args:
      counts: number of images of each user.
      max_examples: maximum number of images selected.

    Returns:
      Pairs of user and image, ascending.

    >>> choose_examples([3, 1], max_examples=3)
    [(0, 0), (0, 1), (1, 0)]
    """
    places = [(turn, user) for user, count in enumerate(counts) for turn in range(count)]
    return sorted((user, turn) for turn, user in sorted(places)[:max_examples])
