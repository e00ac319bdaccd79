"""Peak memory of each step of a classifier run, at growing numbers of photos.

    python -m tests.benchmarks.bench_memory [--backbone lite2.keras] [--photos 3000,10000,50000]

The run is that of the preset `cifar10_lite2_head` in two rounds, on random photos. Without the
backbone of the preset, a small one is drawn, whose activations say nothing.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.benchmarks.tiny import TINY

SIZE = 16 if TINY else 160
PUBLIC = 400 if TINY else 6000


def _photos(path: Path, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    encoded = []
    for pixels in np.random.default_rng(count).integers(0, 256, (count, 8, 8, 3), np.uint8):
        Image.fromarray(pixels).resize((32, 32)).save(file := io.BytesIO(), "JPEG")
        encoded.append(file.getvalue())
    labels = np.array(["airplane", "bird", "cat", "deer"])[np.arange(count) % 4]
    pq.write_table(pa.table({"image": encoded, "label": labels}), path)


def _small_backbone(path: Path) -> None:
    import keras

    inputs = keras.Input((SIZE, SIZE, 3))
    net = keras.layers.Conv2D(8, 8, 8)(inputs)
    keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(net)).save(path)


def _peaks(command: list[str], mark: str) -> dict[str, float]:
    """Runs a pipeline; returns the peak memory in GB of each step, whose arguments have `mark`."""
    found: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_bytes().decode().split("\0")
                    status = (process / "status").read_text()
                except OSError:  # it has ended
                    continue
                if "--function_to_execute" in words[:-1] and mark in "".join(words):
                    step = words[words.index("--function_to_execute") + 1]
                    peak = int(status.partition("VmHWM:")[2].split()[0]) / 2**20
                    found[step] = max(peak, found.get(step, 0.0))  # its shell has a peak, too
            time.sleep(0.1)
    return found


def main() -> None:
    """Prints a line for each number of photos."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backbone", type=Path)
    parser.add_argument("--photos", default="300" if TINY else "3000,10000,50000")
    asked = parser.parse_args()
    small = {"model.taps": "[]", "model.embedding_dim": 4, "model.principal_directions": 4}
    for count in map(int, asked.photos.split(",")):
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
            names = ("private.parquet", "public.parquet", "small.keras")
            private, public, backbone = (Path(folder, name) for name in names)
            _photos(private, count)
            _photos(public, PUBLIC)
            if asked.backbone is None:
                _small_backbone(backbone)
            settings = (small if asked.backbone is None else {}) | {
                "model.image_size": SIZE,
                "pretraining.import_path": asked.backbone or backbone,
                "pretraining.source.uri": public,
                "mechanism.rounds": 2,
                "mechanism.units_per_round": count * 4 // 5,
                "policy.users_lower_bound": count * 4 // 5,
            }
            command = [sys.executable, "-m", "fedemb", "run", "--config", "cifar10_lite2_head"]
            command += [f"--data={private}", f"--policy={folder}/policy", f"--runs={folder}/runs"]
            command += [f"--set={name}={value}" for name, value in settings.items()]
            peaks = _peaks(command, folder)
        steps = ", ".join(f"{step} {peak:.2f} GB" for step, peak in peaks.items())
        sys.stdout.write(f"{count:,} photos: {steps}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
