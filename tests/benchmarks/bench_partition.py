"""What partition_users costs: users with a few tiny images, drawn into temporary Parquet files.

    python -m tests.benchmarks.bench_partition 100000 1000000 [--images 3] [--beam=--runner=...]

Every size runs in a process of its own. Printed as JSON, one line a size: records per second, CPU
seconds, and the peak of the resident memory of all its processes together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

SIZE = 8
_END = b"\0\0\0\0IEND\xaeB`\x82"
_FILE_USERS = 20_000
SHARD_USERS = 20_000


def tiny_png(user: int, image: int) -> bytes:
    """A canonical PNG of 8 x 8 grey pixels that no other (user, image) has."""
    noise = hashlib.blake2b(b"%d %d" % (user, image), digest_size=SIZE * SIZE).digest()
    raw = b"".join(b"\0" + noise[row : row + SIZE] for row in range(0, SIZE * SIZE, SIZE))
    header = b"IHDR" + struct.pack(">IIBBBBB", SIZE, SIZE, 8, 0, 0, 0, 0)
    body = b"IDAT" + zlib.compress(raw, 0)
    return (
        b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header))
        + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + _END
    )  # fmt: skip


def draw(folder: Path, users: int, images: int) -> None:
    """Writes Parquet files of 20,000 users each; the images of a user are in different files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, start in enumerate(range(0, users, _FILE_USERS)):
        rows = [
            ((user + n * 7919) % users, n)
            for user in range(start, min(start + _FILE_USERS, users))
            for n in range(images)
        ]
        table = pa.table(
            {
                "image": [tiny_png(user, n) for user, n in rows],
                "user_id": [f"user-{user:09d}" for user, _ in rows],
                "label": [str(n % 2) for _, n in rows],
            }
        )
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(table, path, row_group_size=10_000, compression="none")


def partition(folder: Path, users: int, images: int, options: list[str]) -> dict[str, Any]:
    """Partitions the files in `folder / "in"`; returns what it took."""
    from fedemb.config import RunConfig
    from fedemb.data.identity import KeyRef
    from fedemb.steps.partition_users import partition_images

    config = RunConfig.model_validate(
        {
            "purpose": "simulation",
            "data": {"source": {"uri": str(folder / "in"), "format": "parquet"}},
            "partition": {
                "virtual_clients": max(1, users // 32),
                "groupings": 4,
                "shards": max(1, users // SHARD_USERS),
                "evaluation": {"by": "hash", "fraction": 0.01},
            },
            "model": {"image_size": SIZE},
            "mechanism": {
                "kind": "group_poisson_gaussian",
                "rounds": 4,
                "sampling_probability": 0.1,
                "noise_multiplier": 1.0,
            },
            "policy": {"users_lower_bound": users // 2, "delta": 1e-9, "epsilon_cap": 8.0},
        }
    )
    started = time.monotonic()
    done = partition_images(
        config,
        keys=KeyRef("", "", throwaway=b"a key of the benchmark, 32 bytes "),
        root=str(folder / "out"),
        blocks=None,
        header={},
        pipeline_options=options,
    )
    wall, used = time.monotonic() - started, os.times()
    kept = sum(done.counts[f"{kind}_images"] for kind in ("users", "evaluation"))
    if kept != users * images:
        raise RuntimeError(f"{kept} of {users * images} images came through")
    return {"wall_seconds": wall, "cpu_seconds": sum(used[:4])}


def memory_of(root: int) -> int:
    """Resident bytes of a process and its descendants; pages that several share count for each."""
    parents: dict[int, int] = {}
    resident: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            resident[int(entry.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    mine = {root}
    for _ in range(4):
        mine |= {child for child, parent in parents.items() if parent in mine}
    return sum(resident.get(one, 0) for one in mine)


def measure(users: int, images: int, options: list[str]) -> dict[str, Any]:
    """Draws and partitions in a process of its own.

    Returns:
      Users, records, records per second, wall and CPU seconds, peak memory in GB, load of the
      machine, and bytes of what was written.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        (folder / "in").mkdir()
        drawing = multiprocessing.get_context("spawn").Process(
            target=draw, args=(folder / "in", users, images)
        )
        drawing.start()
        drawing.join()
        command = [sys.executable, "-m", __spec__.name, "--inside", str(folder), str(users)]
        command += ["--images", str(images), *(f"--beam={option}" for option in options)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak = 0

        def watch() -> None:
            nonlocal peak
            while child.poll() is None:
                peak = max(peak, memory_of(child.pid))
                time.sleep(0.5)

        watcher = threading.Thread(target=watch)
        watcher.start()
        output = child.communicate()[0]
        watcher.join()
        if child.returncode:
            raise RuntimeError(f"partitioning {users} users ended with {child.returncode}")
        took = json.loads(output.splitlines()[-1])
        written = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    return {
        "users": users,
        "records": users * images,
        "records_per_second": round(users * images / took["wall_seconds"]),
        "wall_seconds": round(took["wall_seconds"], 1),
        "cpu_seconds": round(took["cpu_seconds"], 1),
        "peak_gb": round(peak / 1e9, 3),
        "written_mb": round(written / 1e6, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("users", type=int, nargs="+")
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--beam", action="append", default=[])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for users in given.users:
        if given.inside:
            took = partition(given.inside, users, given.images, given.beam)
        else:
            took = measure(users, given.images, given.beam)
        sys.stdout.write(json.dumps(took) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
