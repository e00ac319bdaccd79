"""The data owner's preflight, and the commands."""

from __future__ import annotations

import io
import unicodedata
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedemb.config import BuiltinData, RunConfig, SourceConfig
from fedemb.data.builtin import PRIVATE, Style, draw, write_builtin
from fedemb.data.identity import (
    INEXACT,
    MISSING,
    NOT_TEXT,
    SinglePrecision,
    name_problem,
    name_text,
)
from fedemb.data.photos import PhotoReader
from fedemb.data.sources import read_public_images
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import file_digest, parse_json
from fedemb.foundation.document import read_json
from fedemb.partition.check import BAD, LEFT_OUT, check, take_census
from tests.kit.pipeline_runs.partition_run import SIZE, make_config, picture, rows_of, write_parquet


def test_good_data_passes_and_nothing_is_written(tmp_path: Path) -> None:
    config = make_config(write_parquet(tmp_path / "rows.parquet", rows_of(30)))
    found = check(config)
    assert found.problems == ()
    assert found.rows == 90
    assert [path.name for path in tmp_path.rglob("*")] == ["rows.parquet"]
    trained, held_out, sizes, groups = found.facts
    counts = [int(fact.split()[0]) for fact in (trained, held_out)]
    assert sum(counts) == 30
    assert sizes == "images of a training user: median 3, largest 3"
    assert groups.startswith("users of a virtual client: smallest ")


def test_bad_records_above_max_bad_fraction_are_a_problem(tmp_path: Path) -> None:
    rows = rows_of(30)
    rows += [{"image": b"junk", "user_id": "x", "label": "y"}] * 5
    rows += [dict(rows[0])]
    source = write_parquet(tmp_path / "rows.parquet", rows)
    found = check(make_config(source))
    assert found.bad_fraction == 5 / 96
    assert "max_bad_fraction" in found.problems[0]
    assert [text.partition(",")[0] for text, _ in (*found.bad, *found.left_out)] == [
        "bytes that are not a whole PNG",
        "the same image again",
    ]
    allowed = make_config(source, data__max_bad_fraction=0.1)
    assert check(allowed).problems == ()


def test_classes_that_cross_the_split_and_too_few_users_are_problems(tmp_path: Path) -> None:
    rows = [{**row, "part": "ab"[n % 2], "label": "c"} for n, row in enumerate(rows_of(12, 1))]
    config = make_config(
        write_parquet(tmp_path / "rows.parquet", rows),
        purpose="release",
        data__source__label_scope="global",
        partition__evaluation={"by": "value", "column": "part", "values": ["b"]},
    )
    problems = " ".join(check(config).problems)
    assert "1 classes are in training and in evaluation" in problems
    assert "fewer than policy.users_lower_bound" in problems


def test_record_counts_add_up(tmp_path: Path) -> None:
    rows = [{**row, "label": str(n % 10)} for n, row in enumerate(rows_of(40, images=4))]
    rows += [{"image": b"junk", "user_id": "x", "label": "y"}, dict(rows[0])]
    config = make_config(
        write_parquet(tmp_path / "rows.parquet", rows),
        data__source__label_scope="global",
        partition__max_images_per_user=3,
        data__max_bad_fraction=0.1,
    )
    found = check(config)
    lost = sum(count for _, count in (*found.bad, *found.left_out))
    assert found.used + lost == found.rows
    assert {"beyond partition.max_images_per_user"} < {text for text, _ in found.left_out}


def classifier(source: str, **overrides: Any) -> RunConfig:
    """Two classes, users of DP-SGD."""
    settings = {
        "task": "classification",
        "data.source.label_scope": "global",
        "model.backbone": "tanh_cnn",
        "model.classes": ["0", "1"],
        "training.algorithm": "dp_sgd",
        "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
        "mechanism": {
            "kind": "poisson_gaussian",
            "rounds": 2,
            "sampling_probability": 0.5,
            "units_per_round": 5,
            "noise_multiplier": 1.0,
        },
    }
    return make_config(source).updated(settings | overrides)


def _png(pixels: np.ndarray, **options: Any) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG", **options)
    return sink.getvalue()


OWN = rows_of(1)[0]["image"]
ODD = {
    # what is odd, with another reason that would be plausible -> columns of the record, its reason
    "an id of spaces, and no photo": ({"user_id": " ", "image": b"junk"}, "user_id_missing"),
    "an id that is the text null": ({"user_id": "null"}, None),
    "no class, and a photo known before": ({"label": "", "image": OWN}, "label_missing"),
    "a class in another case": ({"label": "A"}, "dropped_unlisted_class"),
    "an unlisted class, and no photo": ({"label": "z", "image": b"junk"}, "dropped_unlisted_class"),
    "no image": ({"image": None}, "image_missing"),
    "an image of zero bytes": ({"image": b""}, "image_empty"),
    "half of a photo": ({"image": OWN[: len(OWN) // 2]}, "not_decodable"),
    "a path instead of bytes": ({"image": b"photos/1.png"}, "not_decodable"),
    "a photo in another encoding": (
        {
            "image": _png(PhotoReader(SIZE, 1).read(OWN)[..., 0], compress_level=0),
            "user_id": "user 0",
        },
        "duplicate",
    ),
    "a photo of another user": ({"image": OWN}, None),
    "many pixels in few bytes": (
        {"image": _png(np.zeros((12_000, 12_000), np.uint8))},
        "too_many_pixels",
    ),
}
"""Odd records of a new user, unless named."""


@pytest.mark.parametrize("odd", ODD)
def test_dropped_record_is_counted_under_its_actual_reason(tmp_path: Path, odd: str) -> None:
    changed, reason = ODD[odd]
    rows = [{**row, "label": "ab"[n % 2]} for n, row in enumerate(rows_of(20))]
    record = {"image": picture(999_999), "user_id": "new", "label": "a"} | changed

    def counts(name: str, found: list[dict[str, Any]]) -> Counter[str]:
        source = write_parquet(tmp_path / name, found)
        return take_census(classifier(source, **{"model.classes": ["a", "b"]})).counts

    before, after = counts("before.parquet", rows), counts("after.parquet", [*rows, record])
    assert after["rows"] - before["rows"] == 1
    lost = {name: after[name] - before[name] for name in (*BAD, *LEFT_OUT)}
    assert {name: count for name, count in lost.items() if count} == ({reason: 1} if reason else {})


def test_unused_images_per_unit_are_reported_to_the_owner(tmp_path: Path) -> None:
    rows = [{**row, "label": str(n % 2)} for n, row in enumerate(rows_of(30))]
    source = write_parquet(tmp_path / "rows.parquet", rows)

    def warned(most: int) -> tuple[str, ...]:
        config = classifier(source, **{"training.unit_gradient.images_per_unit": most})
        found = check(config)
        assert found.problems == ()
        return found.warnings

    assert warned(3) == ()
    (warning,) = warned(8)
    assert "No training user has more than 3 images" in warning
    assert "images_per_unit is 8" in warning


def test_unreached_image_cap_is_reported(tmp_path: Path) -> None:
    rows = [{**row, "label": str(n % 2)} for n, row in enumerate(rows_of(60))]
    source = write_parquet(tmp_path / "rows.parquet", rows)
    capped = {
        "training.unit_gradient": {"images_per_unit": 1, "microbatch": 4},
        "partition.max_images_per_user": 5,
        "policy.users_lower_bound": 50,
    }
    mechanism = {
        "kind": "capped_image_poisson",
        "rounds": 2,
        "images_per_round": 5,
        "sampling_probability": 0.05,
        "noise_multiplier": 1.0,
    }
    found = check(classifier(source, **capped, mechanism=mechanism))
    assert found.warnings == (
        "No training user has more than 3 images; partition.max_images_per_user is 5.",
    )


# ---- Which values name the same user: one rule over all types, shards and formats ----


@given(text=st.text())
def test_user_id_normalization_is_idempotent_over_unicode_forms(text: str) -> None:
    canonical = name_text(text)
    if canonical is None:
        return
    assert name_text(canonical) == canonical
    canonical.encode()
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        spelled = f" \t{unicodedata.normalize(form, canonical)}\u200b\n"
        assert name_text(spelled) == canonical


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, "7"),
        (7.0, "7"),
        (-0.0, "0"),
        (7.5, "7.5"),
        (np.int64(7), "7"),
        (np.float32(7), "7"),
        (b" 7 ", "7"),
        ("007", "007"),
        *((text, text) for text in ("007.0", "+7.0", "7.", ".0", "1.0.0", "7.01")),
        *((seven, "7") for seven in ("7.0", b"7.0", " 7.000 ", "\uff17.0", Decimal("7.00"))),
        ("+7", "+7"),
        ("12e45", "12e45"),
        ("1e5", "1e5"),
        ("1.5", "1.5"),
        (True, "True"),
        ("\ufb01sh", "fish"),
        ("Ada", "Ada"),
        ("ada", "ada"),
        (1234567890123456789, "1234567890123456789"),
        ("1234567890123456789", "1234567890123456789"),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (b"\xff\xfe", None),
        ("\u200b \ufeff", None),
        ([], None),
        ({}, None),
    ],
)
def test_user_id_has_one_spelling(value: object, expected: str | None) -> None:
    assert name_text(value) == expected


@given(number=st.integers(-(2**53) + 1, 2**53 - 1))
def test_all_types_of_a_whole_number_are_one_user(number: int) -> None:
    spelled = (number, float(number), str(number), f"{number}.0", str(number).encode())
    assert {name_text(value) for value in spelled} == {str(number)}


@pytest.mark.parametrize(
    "value",
    [
        float(2**53),
        -1e300,
        float("inf"),
        SinglePrecision(2**24),
        np.float32(2**24),
        "9007199254740994.0",
        "1.5e+16",
        b"1.23457E+11",
        "1e+20",
    ],
)
def test_id_that_lost_digits_is_refused_with_the_reason(value: object) -> None:
    assert name_text(value) is None
    assert name_problem(value) == INEXACT


def test_largest_exact_numbers_are_ids() -> None:
    assert name_text(float(2**53 - 1)) == str(2**53 - 1)
    assert name_text(SinglePrecision(2**24 - 1)) == str(2**24 - 1)


@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, MISSING), (float("nan"), MISSING), ("", MISSING), (b"\xff" * 16, NOT_TEXT)],
)
def test_invalid_user_id_is_reported_with_its_reason(value: object, problem: str) -> None:
    assert name_text(value) is None
    assert name_problem(value) == problem


# ---- Documents between steps: strict JSON of a known schema, or one sentence ----


SCHEMA = "fedemb/thing/1"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_in_a_json_document_are_refused(number):
    text = '{"schema": "%s", "nested": [{"epsilon": %s}]}'
    assert parse_json((text % (SCHEMA, "1.5")).encode(), SCHEMA, "thing.json")
    with pytest.raises(ArtifactError, match=r"thing\.json.*not a number"):
        parse_json((text % (SCHEMA, number)).encode(), SCHEMA, "thing.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "has schema None"),
        (b'{"schema": "fedemb/thing/2"}', "expected 'fedemb/thing/1'"),
    ],
)
def test_invalid_document_is_named_in_the_error(data, words):
    with pytest.raises(ArtifactError, match=words):
        parse_json(data, SCHEMA, "thing.json")


def test_missing_document_error_names_the_step_to_run(tmp_path):
    with pytest.raises(ArtifactError, match=r"thing\.json is missing.*run the step"):
        read_json(tmp_path / "thing.json", SCHEMA)


# ---- The glyphs of `make run` ----


SMALL = BuiltinData(users=120, images_per_user=3, public_classes=5, public_images_per_class=4)


def images(style: Style, identities: int = 200, each: int = 4, seed: int = 0) -> np.ndarray:
    chunks = draw(style, seed=seed, users=identities, images_each=each, image_size=28)
    return np.concatenate([drawn for drawn, _ in chunks])


def test_builtin_data_of_the_same_seed_is_identical(tmp_path: Path) -> None:
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


def test_builtin_data_has_the_configured_users_classes_and_columns(tmp_path: Path) -> None:
    write_builtin(SMALL, 28, tmp_path / "private.parquet", tmp_path / "public.parquet")
    table = pq.read_table(tmp_path / "private.parquet")
    assert table.column_names == ["image", "user_id", "label"]
    assert len(set(table["user_id"].to_pylist())) == 120
    pixels, labels = read_public_images(
        SourceConfig(uri=str(tmp_path / "public.parquet")), PhotoReader(28, 1)
    )
    assert pixels.shape == (20, 28, 28, 1)
    assert np.unique(labels, return_counts=True)[1].tolist() == [4] * 5


def test_pixel_accuracy_on_builtin_data_is_above_chance_and_not_perfect() -> None:
    """Nearest neighbour on raw pixels: far above chance (1/200), far below perfect."""
    drawn = images(PRIVATE).astype(np.float32)
    queries, gallery = drawn[:, 0].reshape(200, -1), drawn[:, 1].reshape(200, -1)
    queries = queries - queries.mean(1, keepdims=True)
    gallery = gallery - gallery.mean(1, keepdims=True)
    scores = queries @ gallery.T / np.linalg.norm(gallery, axis=1)
    right = (scores.argmax(1) == np.arange(200)).mean()
    assert 0.1 < right < 0.8
