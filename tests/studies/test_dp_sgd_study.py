"""The study of DP-SGD: its rows, one training of each part on a few images, tables and pictures."""

import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from studies.dp_sgd import train
from studies.dp_sgd.grid import rows

LONG = [pytest.param(part, marks=pytest.mark.slow) for part in ("squares", "layers", "units")]
FEW = {"batch": 20, "rounds": 2, "rate": 1.0}


def _images(path, classes, count=80):
    random = np.random.default_rng(0)
    images = []
    for pixels in random.integers(0, 256, (count, 32, 32, 3), np.uint8):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        images.append(buffer.getvalue())
    labels = [f"class {number % classes}" for number in range(count)]
    users = [str(number) for number in range(count)]
    pq.write_table(pa.table({"image": images, "label": labels, "user_id": users}), path)


@pytest.fixture
def data(tmp_path, monkeypatch):
    for name, value in {"TRAIN": 40, "HELD_OUT": 20, "PUBLIC": 40}.items():
        monkeypatch.setattr(train, name, value)
    for name, value in {"WRITERS": 30, "HELD_OUT_WRITERS": 10}.items():
        monkeypatch.setattr(train, name, value)
    _images(tmp_path / "cifar10_train.parquet", 10)
    _images(tmp_path / "tinyimagenet32.parquet", 4)
    return train.Data(tmp_path, tmp_path / "cache")


def _small(row):
    changes = {name: FEW[name] for name in FEW if name in row.settings}
    if "population" in row.settings:  # the ladder: a share of 1/2 of 40 images
        changes |= {"population": 40, "share": 0.5}
    return replace(row, settings={**row.settings, **changes})


def test_a_shuffled_run_may_claim_less_than_the_two_secret_orders():
    found = {}
    for row in rows():
        if row.part == "samplers" and row.at == 2.0:
            found[row.name] = train.run_row(row, None)["value"]
    assert found["poisson"] < found["shuffled"]


@pytest.mark.long
@pytest.mark.parametrize("part", ["ladder", *LONG])
def test_one_row_of_each_part_trains(data, part):
    of_part = [row for row in rows() if row.part == part]
    for row in (of_part[0], of_part[1]):
        found = train.run_row(_small(row), data)
        assert 0 <= found["value"] <= 1
        assert found["noise"] > 0
