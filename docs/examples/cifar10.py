"""Writes CIFAR-10 as private photos and CIFAR-100 as public photos, both as Parquet.

`python docs/examples/cifar10.py photos` downloads both data sets through Keras, once, and writes
`photos/private.parquet` and `photos/public.parquet` with the columns `image` and `label`.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def write(path: Path, images: np.ndarray, labels: list[str]) -> None:
    """Writes images, uint8 [images, height, width, 3], with the name of the class of each."""
    pq.write_table(pa.table({"image": list(map(png, images)), "label": labels}), path)
    print(f"{path}: {len(images):,} photos of {len(set(labels))} classes")


if __name__ == "__main__":
    import keras

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    (images, labels), _ = keras.datasets.cifar10.load_data()
    write(folder / "private.parquet", images, [CLASSES[number] for number in labels.ravel()])
    (images, labels), _ = keras.datasets.cifar100.load_data()
    write(folder / "public.parquet", images, [f"public {number}" for number in labels.ravel()])
