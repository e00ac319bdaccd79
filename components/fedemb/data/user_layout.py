"""Layout of a folder of users: file names and sizes shared by writers and readers.

    manifest.json                       schema `fedemb/user_store/1`, private counts, digests
    users-00000-of-00004.arrayrecord    user records, sorted by user key over all shards
    users-00000-of-00004.parquet        user_key, images: one line per record of the shard
    groups-00003-00000-of-00062.arrow   `users/` only: a range of the groups of grouping 3

Public constants limit the size of each file: `partition.shards` for a shard, `GROUPS_PER_FILE` for
a file of groups. Everything here is Raw.
"""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict, cast

from fedemb.foundation.document import read_json

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
