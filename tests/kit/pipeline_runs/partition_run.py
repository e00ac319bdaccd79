"""A tiny private set, a partition of it, and what it wrote: for the tests of partition_users."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedemb.config import RunConfig
from fedemb.data.client_data import (
    STORE_SCHEMA,
    WRITER_OPTIONS,
    GroupIndex,
    UserStore,
    VerifiedFolder,
    encode_groups,
    encode_index,
    group_files,
    groups_in_file,
    groups_name,
    index_name,
    shard_name,
    split_groups,
)
from fedemb.data.identity import Hasher, KeyRef
from fedemb.data.pixels import encode_png
from fedemb.data.records import UserRecord, encode_user
from fedemb.documents.artifacts import RunArtifacts
from fedemb.foundation.canonical_json import tree_digests
from fedemb.foundation.document import write_json
from fedemb.runtime.step_context import StepContext
from tests.kit.signed_backbone import no_rehearsal, sign_start

KEY = b"a key of the tests, 32 bytes long"
SIZE = 8


def picture(seed: int) -> bytes:
    """One of endlessly many different tiny images."""
    rng = np.random.default_rng(seed)
    return encode_png(rng.integers(0, 256, (SIZE, SIZE, 1), np.uint8))


def rows_of(users: int, images: int = 3) -> list[dict[str, Any]]:
    return [
        {"image": picture(user * 1000 + n), "user_id": f"user {user}", "label": f"{user}-{n % 2}"}
        for user in range(users)
        for n in range(images)
    ]


def make_config(uri: str, **overrides: Any) -> RunConfig:
    """A configuration for tiny images; overrides are dotted, with `__` for the dot."""
    base = {
        "purpose": "simulation",
        "tuning": {"data": "public", "method": "on drawn glyphs"},
        "data": {"source": {"uri": uri}},
        "partition": {"virtual_clients": 5, "groupings": 2, "shards": 2},
        "model": {"image_size": SIZE},
        "mechanism": {
            "kind": "group_poisson_gaussian",
            "rounds": 2,
            "sampling_probability": 0.5,
            "noise_multiplier": 1.0,
        },
        "policy": {"users_lower_bound": 10, "delta": 1e-3, "epsilon_cap": 8.0},
    }
    return RunConfig.model_validate(base).updated(
        {name.replace("__", "."): value for name, value in overrides.items()}
    )


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], row_group_size: int = 7) -> str:
    names = list(rows[0])
    table = pa.table({name: [row[name] for row in rows] for name in names})
    pq.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def tfrecord(records: Sequence[bytes]) -> bytes:
    """A file of records, each with its length and the masked checksums of both."""

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    pairs = [(struct.pack("<Q", len(record)), record) for record in records]
    return b"".join(length + masked(length) + each + masked(each) for length, each in pairs)


@dataclass
class Result:
    """What one partition wrote."""

    root: Path
    counts: dict[str, int]

    @property
    def files(self) -> dict[str, str]:
        return tree_digests(self.root)

    def records(self, kind: str = "users") -> dict[int, UserRecord]:
        store = UserStore(VerifiedFolder(self.root / kind))
        return {record.user_key: record for record in store.read(range(len(store)))}

    def groups(self) -> list[list[frozenset[int]]]:
        """User keys of every group of every grouping."""
        index = GroupIndex(VerifiedFolder(self.root / "users"))
        keys = index.user_keys.tolist()
        return [
            [
                frozenset(keys[row] for row in index.members(grouping, group))
                for group in range(index.virtual_clients)
            ]
            for grouping in range(index.groupings)
        ]

    def rejects(self) -> list[dict[str, str]]:
        files = sorted((self.root / "rejects").glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        return [row for row in rows for _ in range(row.pop("times"))]


def write_store(
    folder: Path,
    records: Sequence[UserRecord],
    size: int,
    groups: np.ndarray | None = None,
    clients: int = 0,
) -> None:
    """Writes a user store by hand, of a single shard.

    Args:
      folder: of the users; its name is that of the shard.
      records: of the users, by ascending keys.
      size: of an image, in pixels.
      groups: uint32 [groupings, users]; None: no groupings, no groups.
      clients: virtual clients per grouping.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True)
    shard = shard_name(folder.name, 0, 1)
    writer = ArrayRecordWriter(str(folder / shard), WRITER_OPTIONS)
    for record in records:
        writer.write(encode_user(record))
    writer.close()
    keys = np.array([record.user_key for record in records], np.uint64)
    counts = np.array([len(record.images) for record in records], np.uint32)
    (folder / index_name(shard)).write_bytes(encode_index(keys, counts))
    for grouping, row in enumerate([] if groups is None else groups):
        pieces = dict(split_groups(0, row))
        for part in range(group_files(clients)):
            mine = [pieces[part]] if part in pieces else []
            data = encode_groups(mine, groups_in_file(part, clients))
            (folder / groups_name(grouping, part, clients)).write_bytes(data)
    grouped = {} if groups is None else {"virtual_clients": clients, "groupings": len(groups)}
    shards = [{"name": shard, "users": len(records)}]
    manifest = {"image_size": size, "channels": 1, "shards": shards, **grouped}
    write_json(folder / "manifest.json", STORE_SCHEMA, manifest)


def user_key(user_id: str) -> int:
    return int.from_bytes(Hasher(KEY).user_key(user_id), "big")


def reserved_config(root: Path, users: int = 20) -> RunConfig:
    """The configuration of the run at `root`, whose images are written if they are not there."""
    source = root / "rows.parquet"
    if not source.exists():
        root.mkdir(exist_ok=True)
        write_parquet(source, rows_of(users))
    return make_config(str(source), policy__epsilon_cap=1000.0)


def context_of(config: RunConfig, root: Path, run_id: str = "run-1") -> StepContext:
    """What the step is given."""
    names = {"privacy_plan": "plan.json", "reservation": "reservation.json"}
    paths = {name: root / file for name, file in names.items()}
    stores = {"private_root": "private", "ledger": "ledger", "keys": "keys"}
    return StepContext(
        RunArtifacts(**paths, users=root / "manifest.json", pretrained=root / "pretrained"),
        config=config,
        run_id=run_id,
        **{name: str(root / place) for name, place in stores.items()},
    )


def reserve_for(config: RunConfig, root: Path, run_id: str = "run-1") -> dict[str, Any]:
    """Plans and reserves the run; returns the reservation."""
    from fedemb.steps import plan_privacy, reserve_budget

    context = context_of(config, root, run_id)
    plan_privacy.run(context)
    sign_start(context)
    return reserve_budget.run(context, rehearse=no_rehearsal)["body"]


class Partitioner:
    """Partitions rows (written as Parquet) or an address, with dotted config overrides."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._made = 0

    def __call__(
        self,
        source: Sequence[dict[str, Any]] | str,
        *,
        blocks: frozenset[str] | None = None,
        options: Sequence[str] = (),
        row_group_size: int = 7,
        **overrides: Any,
    ) -> Result:
        from fedemb.steps.partition_users import partition_images

        self._made += 1
        if not isinstance(source, str):
            path = self.folder / f"rows-{self._made}.parquet"
            source = write_parquet(path, source, row_group_size)
        root = self.folder / f"out-{self._made}"
        done = partition_images(
            make_config(source, **overrides),
            keys=KeyRef("", "", throwaway=KEY),
            root=str(root),
            blocks=blocks,
            header={"run_id": "run"},
            pipeline_options=options,
        )
        return Result(root, done.counts)
