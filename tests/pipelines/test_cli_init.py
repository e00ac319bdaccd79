"""`fedemb init`: a configuration for photos, with no false claim."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedemb.errors import ConfigError, InputError
from fedemb.partition.check import check
from fedemb.pipelines.cli.init_settings import customary_delta
from fedemb.pipelines.run.load_config import load_config
from tests.kit.cli import fedemb

ANSWERS = ("--users-lower-bound", "3000", "--public", "none", "--epsilon", "8")


def photo(seed: int, colour: bool, size: tuple[int, int] = (80, 50)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    image = Image.fromarray(pixels) if colour else Image.fromarray(pixels[..., 0])
    sink = io.BytesIO()
    image.save(sink, "JPEG")
    return sink.getvalue()


def photos(colour: bool = True) -> list[tuple[str, str, bytes]]:
    """User, class, file: 12 users with 3 photos of 4 classes."""
    return [
        (f"u{user}", f"c{(user + n) % 4}", photo(100 * user + n, colour))
        for user in range(12)
        for n in range(3)
    ]


def as_parquet(root: Path, colour: bool = True, owner: str = "owner") -> Path:
    users, labels, images = zip(*photos(colour), strict=True)
    table = pa.table({"photo": list(images), owner: list(users), "category": list(labels)})
    pq.write_table(table, root / "rows.parquet")
    return root / "rows.parquet"


def test_init_configuration_matches_the_photos_and_options(tmp_path):
    output = tmp_path / "mine.yaml"
    said = fedemb("init", "--data", as_parquet(tmp_path), "-o", output, *ANSWERS)
    config = load_config(output)
    assert "36 photos" in said
    assert config.model.channels == 3
    assert config.model.image_size == 48  # the photos' shorter side is 50
    assert config.data.source.label_scope == "global"
    assert config.policy.users_lower_bound == 3000
    assert config.policy.delta < 1 / 3000
    assert config.pretraining.kind == "none"
    assert "noise on the mean" in said


def test_init_declares_only_what_the_owner_passed(tmp_path):
    output = tmp_path / "mine.yaml"
    fedemb("init", "--data", as_parquet(tmp_path), "-o", output, *ANSWERS)
    config = load_config(output)
    assert config.purpose == "simulation"
    assert config.tuning.data == "undeclared"
    assert config.pretraining.licence == "unknown"
    counted = output.read_text().replace(str(tmp_path), "")
    assert "36" not in counted  # the number of photos is private
    with pytest.raises(ConfigError, match="how its hyperparameters were chosen"):
        load_config(output, ["purpose=release"])


def test_imported_network_is_frozen_and_sets_the_input(tmp_path):
    import keras

    net = keras.Sequential(
        [keras.Input((40, 40, 1)), keras.layers.Conv2D(8, 3), keras.layers.GlobalAveragePooling2D()]
    )
    net.save(tmp_path / "net.keras")
    begun = ("init", "--data", as_parquet(tmp_path), "-o", tmp_path / "mine.yaml",
             *ANSWERS, "--public", tmp_path / "net.keras")  # fmt: skip
    with pytest.raises(ConfigError, match="--pixels is missing"):
        fedemb(*begun)
    with pytest.raises(ConfigError, match=r"one of -1\.\.1, 0\.\.1"):
        fedemb(*begun, "--pixels", "bright")
    said = fedemb(*begun, "--pixels", "-1..1")
    config = load_config(tmp_path / "mine.yaml")
    model = config.model
    assert (model.image_size, model.channels, model.trainable) == (40, 1, "projection")
    assert config.pretraining.import_pixels == "-1..1"
    assert "40 x 40 pixels, grey" in said


def test_init_holds_out_shared_classes_of_the_given_list(tmp_path):
    data, output = as_parquet(tmp_path), tmp_path / "mine.yaml"
    assert "4 shared classes" in fedemb("init", "--data", data, "-o", output, *ANSWERS)
    output.unlink()
    fedemb("init", "--data", data, "-o", output, *ANSWERS, "--classes", "c0, c1,c2,c3")
    assert load_config(output).partition.evaluation.classes == ("c0", "c1", "c2", "c3")


def test_init_option_alike_user_sets_label_scope_user(tmp_path):
    data, output = as_parquet(tmp_path), tmp_path / "mine.yaml"
    said = fedemb("init", "--data", data, "-o", output, *ANSWERS, "--alike=user")
    assert "photos of one user are alike" in said
    assert "12 classes" in said
    source = load_config(output).data.source
    assert (source.label_scope, source.columns.label) == ("user", None)


@pytest.mark.parametrize("bound", [35, 1000, 160_000, 2_000_000, 10**9])
def test_init_delta_is_at_most_the_customary_bound(bound):
    delta = customary_delta(bound)
    assert 0.5 * bound**-1.1 < delta <= bound**-1.1 or delta == 1e-5


def test_init_does_not_overwrite_an_existing_file(tmp_path):
    data, output = as_parquet(tmp_path), tmp_path / "mine.yaml"
    output.write_text("precious")
    with pytest.raises(InputError, match="exists"):
        fedemb("init", "--data", data, "-o", output, *ANSWERS)
    assert output.read_text() == "precious"


@pytest.mark.parametrize("labelled", [True, False])
def test_init_counts_all_users_with_and_without_a_label_column(tmp_path, labelled):
    """The lower bound is chosen from this number; the run's key decides who is held out."""
    rows = {
        "photo": [photo(n, True) for n in range(60)],
        "owner": [f"u{n % 30}" for n in range(60)],
    }
    if labelled:
        rows["category"] = rows["owner"]
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    said = fedemb(
        "init", "--data", tmp_path / "rows.parquet", "-o", tmp_path / "new" / "mine.yaml", *ANSWERS
    )
    assert "60 photos; 30 usable users" in said
    assert load_config(tmp_path / "new" / "mine.yaml").data.source.label_scope == "user"


def as_classes(root: Path) -> Path:
    for label in ("cat", "dog"):
        for n in range(6):
            path = root / "classes" / label / f"{n}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photo(n + 10 * len(label) + ord(label[0]), True))
    return root / "classes"


def test_a_folder_for_each_class_becomes_a_classifier_whose_units_are_images(tmp_path):
    data, output = as_classes(tmp_path), tmp_path / "mine.yaml"
    assert "--task classification" in fedemb("init", "--data", data, "-o", output, *ANSWERS)
    output.unlink()
    begun = ("init", "--data", data, "-o", output, *ANSWERS, "--task", "classification")
    with pytest.raises(ConfigError, match="Pass --classes"):
        fedemb(*begun)
    said = fedemb(*begun, "--classes", "dog, cat")
    assert "12 photos; 12 usable" in said
    assert "one class: cat, dog" in said
    assert "usable here" in said
    assert "Single images are covered" in said
    assert "user" not in said.partition("warning")[0]
    config = load_config(output)
    assert config.task == "classification"
    assert config.model.classes == ("dog", "cat")
    assert config.policy.unit == "image"
    assert config.data.source.columns.user_id is None
    assert config.purpose == "simulation"
    assert config.mechanism.noise_multiplier > 0
    found = check(config)
    assert found.problems == ()
    assert found.used == 12


def test_init_classifier_with_a_user_column_has_user_level_privacy(tmp_path):
    output = tmp_path / "mine.yaml"
    begun = ("init", "--data", as_parquet(tmp_path), "-o", output, *ANSWERS)
    fedemb(*begun, "--task", "classification", "--classes", "c0,c1,c2,c3")
    config = load_config(output)
    assert config.policy.unit == "user"
    assert config.data.source.columns.user_id == "owner"
    assert config.data.source.label_scope == "global"


def test_table_with_one_image_per_user_has_image_units(tmp_path):
    """As classifiers' data sets come: an image and its class."""
    table, output = tmp_path / "train.parquet", tmp_path / "mine.yaml"
    rows = [photo(n, True, (16, 16)) for n in range(150)]
    pq.write_table(pa.table({"img": rows, "label": [str(n % 2) for n in range(150)]}), table)
    begun = ("init", "--data", table, "-o", output, *ANSWERS)
    with pytest.raises(InputError, match="user_id=none, which makes each a unit of privacy"):
        fedemb(*begun)
    nobody = ("--column", "user_id=none")
    with pytest.raises(ConfigError, match="embeddings need the owner"):
        fedemb(*begun, *nobody)
    with pytest.raises(InputError, match="kind"):
        fedemb(*begun, *nobody, "--task", "classification", "--column", "label=kind")
    said = fedemb(*begun, *nobody, "--task", "classification", "--classes", "0,1")
    assert "150 photos; 150 usable" in said
    assert "user" not in said.partition("wrote")[0]
    config = load_config(output)
    assert (config.policy.unit, config.data.source.columns.user_id) == ("image", None)
    assert config.policy.policy_id == "train-photos"
    assert check(config).problems == ()
