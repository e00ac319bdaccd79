import numpy as np
import pyarrow.parquet as pq
import pytest

from fedemb.config import BackboneConfig, ModelConfig, PretrainingConfig
from fedemb.data.pixels import encode_png
from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.foundation.canonical_json import file_digest
from fedemb.keys import open_key_store
from fedemb.models.backbone_files import load_backbone
from fedemb.models.backbones import build_backbone
from fedemb.models.inference import embed
from fedemb.steps import pretrain_public
from fedemb.steps.pretrain_public import run

MODEL = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)


def _start(pretraining, seed=0):
    return BackboneConfig(model=MODEL, pretraining=pretraining, seed=seed)


def _keys(folder):
    return open_key_store(str(folder / "keys"))


def _blobs(classes=20, images=12, seed=0):
    centers = np.random.default_rng(0).uniform(0, 255, (classes, 4, 4)).repeat(3, 1).repeat(3, 2)
    random = np.random.default_rng(seed)
    labels = np.arange(classes).repeat(images)
    noisy = centers[labels] + 40 * random.normal(size=(len(labels), 12, 12))
    return np.clip(noisy, 0, 255).astype(np.uint8)[..., None], labels


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    import pyarrow as pa

    images, labels = _blobs()
    encoded = list(map(encode_png, images))
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


@pytest.mark.parametrize(
    "how",
    [{"kind": "supervised"}, {"kind": "supervised", "mixed_precision": True}],
    ids=["supervised", "bfloat16"],
)
def test_pretraining_separates_classes_on_new_images(how, parquet, tmp_path):
    settings = PretrainingConfig.model_validate(
        {**how, "source": {"uri": parquet}, "epochs": 12, "batch_size": 24,
         "learning_rate": 0.02, "licence": "CC0", "provenance": "drawn"}
    )  # fmt: skip
    card = run(_start(settings, seed=3), tmp_path, _keys(tmp_path))
    assert (card["images"], card["classes"]) == (240, 20)
    assert card["weights_sha"] == file_digest(tmp_path / "backbone.keras")
    trained = load_backbone(tmp_path / "backbone.keras", MODEL)
    assert _separation(trained) > _separation(build_backbone(MODEL, 3)) + 0.05


def test_training_that_diverges_is_refused(parquet, tmp_path, monkeypatch):
    settings = PretrainingConfig.model_validate({"kind": "supervised", "source": {"uri": parquet}})
    monkeypatch.setattr(pretrain_public, "pretrain", lambda *_, **__: float("nan"))
    with pytest.raises(InputError, match=r"loss nan; lower pretraining.learning_rate"):
        run(_start(settings, seed=3), tmp_path, _keys(tmp_path))


def test_without_pretraining_the_weights_come_from_the_seed(tmp_path):
    shas = {
        run(_start(PretrainingConfig(), seed), tmp_path / str(n), _keys(tmp_path))["weights_sha"]
        for n, seed in enumerate((1, 1, 2))
    }
    assert len(shas) == 2
    weights = load_backbone(tmp_path / "0" / "backbone.keras", MODEL).get_weights()
    for one, other in zip(weights, build_backbone(MODEL, 1).get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def _import(path, tmp_path):
    settings = PretrainingConfig(kind="import", import_path=str(path))
    return run(_start(settings), tmp_path / "out", _keys(tmp_path))


def test_import_takes_a_backbone_of_known_layers(tmp_path):
    backbone = build_backbone(MODEL, 5)
    backbone.save(tmp_path / "own.keras")
    _import(tmp_path / "own.keras", tmp_path)
    imported = load_backbone(tmp_path / "out" / "backbone.keras", MODEL)
    np.testing.assert_array_equal(imported.get_weights()[0], backbone.get_weights()[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_import_of_weights_that_are_not_finite_is_refused(tmp_path, value):
    backbone = build_backbone(MODEL, 5)
    weights = backbone.get_weights()
    weights[-1].flat[0] = value
    backbone.set_weights(weights)
    backbone.save(tmp_path / "own.keras")
    with pytest.raises(ArtifactError, match="NaN or infinite weights"):
        _import(tmp_path / "own.keras", tmp_path)


def test_import_replaces_the_classifier_head_with_zeros(tmp_path):
    model = MODEL.model_copy(update={"classes": ("a", "b", "c"), "whitened_directions": 0})
    start = build_backbone(model.model_copy(update={"head_init": "glorot"}), 5)
    start.save(tmp_path / "run.keras")
    settings = PretrainingConfig(kind="import", import_path=str(tmp_path / "run.keras"))
    run(BackboneConfig(model=model, pretraining=settings, seed=0), tmp_path, _keys(tmp_path))
    imported = load_backbone(tmp_path / "backbone.keras", model)
    *trunk, kernel, bias = imported.get_weights()
    for found, wanted in zip(trunk, start.get_weights(), strict=False):
        np.testing.assert_array_equal(found, wanted)
    assert not kernel.any()
    assert not bias.any()


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    """Keras's MobileNetV2, whose normalisations have seen other images, with dropout at its end."""
    import keras

    path = tmp_path_factory.mktemp("application") / "mobilenet.keras"
    model = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, include_top=False, pooling="avg", weights=None
    )
    random = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.set_weights(
                [random.uniform(0.5, 1.5, item.shape) for item in layer.get_weights()]
            )
    whole = keras.Model(model.input, keras.layers.Dropout(0.4)(model.output))
    whole.save(path)
    return path, model


PROJECTED = ModelConfig(
    backbone="tiny", image_size=32, channels=3, embedding_dim=8, trainable="projection"
)


@pytest.mark.long
def test_application_with_batch_norm_is_frozen_and_mixes_no_images(application, tmp_path):
    from fedemb.models.backbones import trainable_variables

    path, model = application
    settings = PretrainingConfig(kind="import", import_path=str(path))
    start = BackboneConfig(model=PROJECTED, pretraining=settings, seed=0)
    run(start, tmp_path / "out", _keys(tmp_path))
    imported = load_backbone(tmp_path / "out" / "backbone.keras", PROJECTED)
    images = np.random.default_rng(1).uniform(-1, 1, (6, 32, 32, 3)).astype(np.float32)
    (kernel,) = (item.numpy() for item in trainable_variables(imported, "projection"))
    wanted = model(images, training=False).numpy() @ kernel
    np.testing.assert_allclose(imported(images, training=False), wanted, rtol=1e-3, atol=1e-4)
    # Also while training: images of one user do not change the output of another; no randomness.
    together = np.asarray(imported(images, training=True))
    np.testing.assert_allclose(together, wanted, rtol=1e-3, atol=1e-4)
    for number in range(len(images)):
        alone = np.asarray(imported(images[number : number + 1], training=True))
        np.testing.assert_allclose(alone[0], together[number], rtol=1e-4, atol=1e-5)
    names = {variable.path for variable in trainable_variables(imported, "projection")}
    assert names == {"embedding/kernel"}
    assert not any("seed" in variable.path for variable in imported.non_trainable_variables)


def test_import_whose_projection_cannot_be_split_off_is_refused(tmp_path):
    """It lies inside of the layer that the fixed scaling of pixels stands before."""
    config = PROJECTED.model_copy(update={"image_size": 8})
    build_backbone(config, 0).save(tmp_path / "own.keras")
    settings = PretrainingConfig(kind="import", import_path=str(tmp_path / "own.keras"))
    run(
        BackboneConfig(model=config, pretraining=settings, seed=0),
        tmp_path / "out",
        _keys(tmp_path),
    )
    scaled = settings.model_copy(update={"import_pixels": "0..255"})
    with pytest.raises(ConfigError, match="needs a layer embedding at the end"):
        run(
            BackboneConfig(model=config, pretraining=scaled, seed=0),
            tmp_path / "other",
            _keys(tmp_path),
        )
