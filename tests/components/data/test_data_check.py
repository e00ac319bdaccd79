"""The data owner's preflight, and the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.partition.check import check
from tests.kit.pipeline_runs.partition_run import make_config, rows_of, write_parquet


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


def test_too_many_bad_records_are_a_problem_here_and_not_in_the_pipeline(tmp_path: Path) -> None:
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


def test_every_record_is_used_bad_or_left_out(tmp_path: Path) -> None:
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
    tree = make_config(source).model_dump(mode="json")
    for dotted, value in (settings | overrides).items():
        *parents, leaf = dotted.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    return RunConfig.model_validate(tree)


def test_places_for_images_that_no_user_has_are_said_to_the_owner(tmp_path: Path) -> None:
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


def test_a_cap_that_is_priced_and_no_user_reaches_is_said(tmp_path: Path) -> None:
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
