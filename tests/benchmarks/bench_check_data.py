"""What `fedemb check-data` costs: JPEG photos of 500 x 400 in one Parquet file, checked once.

    python -m tests.benchmarks.bench_check_data 4000

Printed as JSON: processor seconds of the command, start included, and of 1,000 photos beyond those
of the first 100; peak of its resident memory; bytes of a photo; load of the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from tests.benchmarks.tiny import TINY

SIZE = (500, 400)
FEW = 20 if TINY else 100
_OWNERS = 20
"""Photos of a user."""


def photo(random: np.random.Generator) -> bytes:
    """A JPEG of coarse shapes and fine noise, about as large as a phone's of this size."""
    shapes = random.integers(0, 256, (10, 8, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(shapes).resize(SIZE, Image.Resampling.BICUBIC), np.int16)
    grain = random.normal(0, 12, (*SIZE[::-1], 1)).astype(np.int16)
    data = io.BytesIO()
    pixels = np.clip(image + grain, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(data, "JPEG", quality=85)
    return data.getvalue()


def draw(folder: Path, count: int) -> None:
    """Writes photos and their configuration."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    photos = [photo(random) for _ in range(count)]
    users = [f"user-{number // _OWNERS}" for number in range(count)]
    pq.write_table(
        pa.table({"image": photos, "user_id": users}), folder / "photos.parquet", row_group_size=500
    )
    config = {
        "purpose": "simulation",
        "data": {"source": {"uri": str(folder / "photos.parquet"), "columns": {"label": None}}},
        "partition": {"virtual_clients": 2, "evaluation": {"by": "hash", "fraction": 0.1}},
        "model": {"image_size": 64, "channels": 3},
        "mechanism": {
            "kind": "group_poisson_gaussian",
            "rounds": 4,
            "sampling_probability": 0.5,
            "noise_multiplier": 1.0,
        },
        "policy": {"users_lower_bound": 4, "delta": 1e-6, "epsilon_cap": 8.0},
    }
    (folder / "photos.yaml").write_text(yaml.safe_dump(config))


def look(count: int) -> dict[str, float]:
    """Draws photos and checks them in another process: seconds, peak in MB, bytes each."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        # Drawn in another process, because a process inherits the peak memory of its parent.
        drawing = get_context("spawn").Process(target=draw, args=(folder, count))
        drawing.start()
        drawing.join()
        command = [sys.executable, "-m", "fedemb", "check-data", "--config", "photos.yaml"]
        with (folder / "said").open("wb") as said:
            child = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
            _, _, used = os.wait4(child.pid, 0)
        if f"{count:,}" not in (text := (folder / "said").read_text()):
            raise RuntimeError(f"check-data did not read {count:,} photos: {text}")
        each = (folder / "photos.parquet").stat().st_size // count
    seconds = used.ru_utime + used.ru_stime
    return {"seconds": seconds, "peak_mb": used.ru_maxrss / 1024, "bytes": each}


def measure(count: int) -> dict[str, Any]:
    """Looks at few photos and at many."""
    few, many = look(FEW), look(count)
    return {
        "photos": count,
        "cpu_seconds": round(many["seconds"], 1),
        "cpu_seconds_per_1000": round(1000 * (many["seconds"] - few["seconds"]) / (count - FEW), 2),
        "peak_mb": round(many["peak_mb"]),
        "bytes_per_photo": many["bytes"],
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=int)
    sys.stdout.write(f"{json.dumps(measure(parser.parse_args().photos))}\n")
