import io
import json
import zipfile

import numpy as np
import pytest

from fedemb.config import LossConfig, ModelConfig, PretrainingConfig, PublicStart, TrainingConfig
from fedemb.documents.artifacts import file_digest
from fedemb.embedding import build_backbone, embed, load_backbone, train_centralized
from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.steps.pretrain_public.pretrain import run

MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)


def _start(pretraining, seed=0):
    return PublicStart(model=MODEL, pretraining=pretraining, seed=seed)


def _blobs(classes=20, images=12, seed=0):
    centers = np.random.default_rng(0).uniform(0, 255, (classes, 4, 4)).repeat(3, 1).repeat(3, 2)
    random = np.random.default_rng(seed)
    labels = np.arange(classes).repeat(images)
    noisy = centers[labels] + 40 * random.normal(size=(len(labels), 12, 12))
    return np.clip(noisy, 0, 255).astype(np.uint8)[..., None], labels


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    images, labels = _blobs()
    encoded = []
    for image in images:
        sink = io.BytesIO()
        Image.fromarray(image[..., 0]).save(sink, "PNG")
        encoded.append(sink.getvalue())
    path = tmp_path_factory.mktemp("public") / "public.parquet"
    names = [f"class {label}" for label in labels]
    pq.write_table(pa.table({"image": encoded, "user_id": names, "label": names}), path)
    return str(path)


def _separation(backbone):
    """How much closer two images of one class are than two of different ones."""
    images, labels = _blobs(seed=1)
    similar = embed(backbone, images, 64) @ embed(backbone, images, 64).T
    same = labels[:, None] == labels[None]
    off_diagonal = ~np.eye(len(labels), dtype=bool)
    return similar[same & off_diagonal].mean() - similar[~same].mean()


@pytest.mark.parametrize("kind", ["supervised", "simclr"])
def test_pretraining_tells_classes_apart_on_new_images(kind, parquet, tmp_path):
    settings = PretrainingConfig.model_validate(
        {"kind": kind, "source": {"uri": parquet}, "epochs": 12, "batch_size": 24,
         "learning_rate": 0.02, "licence": "CC0", "provenance": "drawn"}
    )  # fmt: skip
    card = run(_start(settings, seed=3), tmp_path)
    assert (card["images"], card["classes"], card["licence"]) == (240, 20, "CC0")
    assert card["weights_sha"] == file_digest(tmp_path / "backbone.keras")
    trained = load_backbone(tmp_path / "backbone.keras", MODEL)
    assert _separation(trained) > _separation(build_backbone(MODEL, 3)) + 0.05


def test_without_pretraining_the_weights_come_from_the_seed(tmp_path):
    shas = {
        run(_start(PretrainingConfig(), seed), tmp_path / str(n))["weights_sha"]
        for n, seed in enumerate((1, 1, 2))
    }
    assert len(shas) == 2
    weights = load_backbone(tmp_path / "0" / "backbone.keras", MODEL).get_weights()
    for one, other in zip(weights, build_backbone(MODEL, 1).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def _import(path, tmp_path):
    settings = PretrainingConfig(kind="import", import_path=str(path))
    return run(_start(settings), tmp_path / "out")


def test_import_takes_a_backbone_of_known_layers(tmp_path):
    backbone = build_backbone(MODEL, 5)
    backbone.save(tmp_path / "own.keras")
    _import(tmp_path / "own.keras", tmp_path)
    imported = load_backbone(tmp_path / "out" / "backbone.keras", MODEL)
    np.testing.assert_array_equal(imported.get_weights()[0], backbone.get_weights()[0])


def test_import_refuses_code_and_foreign_layers(tmp_path):
    import keras

    inputs = keras.Input((12, 12, 1))
    x = keras.layers.Lambda(lambda t: t * 2)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(8)(keras.layers.Flatten()(x)))
    model.save(tmp_path / "lambda.keras")
    with pytest.raises(ArtifactError, match="Lambda"):
        _import(tmp_path / "lambda.keras", tmp_path)
    inputs = keras.Input((12, 12, 1))
    x = keras.layers.BatchNormalization()(keras.layers.Flatten()(inputs))
    keras.Model(inputs, keras.layers.Dense(8)(x)).save(tmp_path / "batch.keras")
    with pytest.raises(ArtifactError, match="BatchNormalization"):
        _import(tmp_path / "batch.keras", tmp_path)


def test_import_finds_a_foreign_layer_inside_another_model(tmp_path):
    backbone = build_backbone(MODEL, 5)
    backbone.save(tmp_path / "own.keras")
    with zipfile.ZipFile(tmp_path / "own.keras") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(members["config.json"])
    inner = {"class_name": "Functional", "config": {"layers": [{"class_name": "Evil"}]}}
    config["config"]["layers"].append(inner)
    members["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(tmp_path / "evil.keras", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ArtifactError, match="Evil"):
        _import(tmp_path / "evil.keras", tmp_path)


def test_import_errors_are_sentences(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        _import(tmp_path / "missing.keras", tmp_path)
    (tmp_path / "text.keras").write_text("no zip")
    with pytest.raises(ArtifactError, match=r"not a \.keras file"):
        _import(tmp_path / "text.keras", tmp_path)
    build_backbone(MODEL.model_copy(update={"embedding_dim": 9}), 0).save(tmp_path / "nine.keras")
    with pytest.raises(ConfigError, match=r"model\.embedding_dim"):
        _import(tmp_path / "nine.keras", tmp_path)


def test_centralized_baseline_trains_on_any_labels():
    images, labels = _blobs()
    training = TrainingConfig.model_validate(
        {"local": {"loss": LossConfig(kind="cosface").model_dump()}}
    )
    wild = np.random.default_rng(0).integers(-(2**62), 2**62, 20)[labels]
    backbone = build_backbone(MODEL, 3)
    before = _separation(backbone)
    trained = train_centralized(
        backbone, images, wild, training, epochs=12, batch_size=24, learning_rate=0.02
    )
    assert trained is backbone
    assert _separation(backbone) > before + 0.05
