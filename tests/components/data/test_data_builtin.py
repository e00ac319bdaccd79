"""The glyphs of `make run`: the same for the same seed, and distinguishable, but not trivially."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from fedemb.config import BuiltinData, SourceConfig
from fedemb.data.builtin import PRIVATE, Style, draw, write_builtin
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.foundation.canonical_json import file_digest

SMALL = BuiltinData(users=120, images_per_user=3, public_classes=5, public_images_per_class=4)


def images(style: Style, identities: int = 200, each: int = 4, seed: int = 0) -> np.ndarray:
    chunks = draw(style, seed=seed, identities=identities, images_each=each, image_size=28)
    return np.concatenate(list(chunks))


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    digests = []
    for run in ("a", "b"):
        folder = tmp_path / run
        counts = write_builtin(SMALL, 28, folder / "private.parquet", folder / "public.parquet")
        assert counts == (360, 20)
        digests.append(
            [file_digest(folder / name) for name in ("private.parquet", "public.parquet")]
        )
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]


def test_files_have_the_form_of_real_data(tmp_path: Path) -> None:
    write_builtin(SMALL, 28, tmp_path / "private.parquet", tmp_path / "public.parquet")
    table = pq.read_table(tmp_path / "private.parquet")
    assert table.column_names == ["image", "user_id", "label"]
    assert len(set(table["user_id"].to_pylist())) == 120
    pixels, labels = read_public_images(
        SourceConfig(uri=str(tmp_path / "public.parquet")), PhotoReader(28, 1)
    )
    assert pixels.shape == (20, 28, 28, 1)
    assert np.bincount(labels).tolist() == [4] * 5


def test_identities_can_be_told_apart_but_not_by_their_pixels() -> None:
    """Nearest neighbour on raw pixels: far above chance (1/200), far below perfect."""
    drawn = images(PRIVATE).astype(np.float32)
    queries, gallery = drawn[:, 0].reshape(200, -1), drawn[:, 1].reshape(200, -1)
    queries = queries - queries.mean(1, keepdims=True)
    gallery = gallery - gallery.mean(1, keepdims=True)
    scores = queries @ gallery.T / np.linalg.norm(gallery, axis=1)
    right = (scores.argmax(1) == np.arange(200)).mean()
    assert 0.1 < right < 0.8
