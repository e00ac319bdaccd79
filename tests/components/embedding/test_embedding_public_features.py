"""Features of an imported backbone: taps, mirror image, public constants, and embeddings that keep
them.
"""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

from fedemb.config import (
    BackboneConfig,
    LocalTrainingConfig,
    ModelConfig,
    PretrainingConfig,
    RunConfig,
    TrainingConfig,
)
from fedemb.config.data import SourceConfig
from fedemb.data import sources
from fedemb.data.builtin import drawn_images
from fedemb.data.photos import PhotoReader
from fedemb.data.pixels import encode_png
from fedemb.documents.utility import baselines_of
from fedemb.errors import ConfigError, Refused
from fedemb.keys import open_key_store
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import build_backbone, cut, trainable_variables, without_head
from fedemb.models.imported import check_import, import_backbone, known_pixels, network_output
from fedemb.models.inference import SharedFeatures, classify, embed
from fedemb.models.keras_backend import preprocess
from fedemb.models.layers import constants
from fedemb.models.public_features import (
    fit_constants,
    fit_features,
    needs_public_images,
    with_public_features,
    without_public_features,
)
from fedemb.pipelines.run.load_config import load_config
from fedemb.release.released import load_whitelisted, save_for_serving
from fedemb.steps import pretrain_public
from fedemb.training.backend_rounds import build_rounds
from tests.kit.privacy_worlds import noiseless

COMPONENTS = Path(pretrain_public.__file__).resolve().parents[1]
NET = ModelConfig(backbone="resnet8", projection=False, image_size=16, channels=3, embedding_dim=64)
"""The net in the file."""
MODEL = ModelConfig(
    backbone="imported",
    image_size=16,
    channels=3,
    embedding_dim=8,
    trainable="projection",
    taps=("block2_1_relu2", "pool"),
    mirrored=True,
    square_root=True,
    principal_directions=12,
)


def _leaves(count=96, seed=0):
    return drawn_images(count, 16, 3, seed)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "net.keras"
    save_backbone(build_backbone(NET, 5), path)
    return path


def _of_layers(path, images):
    """The features by hand: pooled layers of the file, of the image and of its mirror image."""
    net = keras.saving.load_model(path, compile=False)
    both = keras.Model(net.input, [net.get_layer("block2_1_relu2").output, net.output])

    def pooled(batch):
        block, head = (np.asarray(part) for part in both(batch))
        return np.concatenate([block.mean((1, 2)), head], axis=1)

    scaled = np.asarray(preprocess(images))
    return (pooled(scaled) + pooled(scaled[:, :, ::-1])) / 2


def _by_hand(path, public, images, classifies):
    features = np.sqrt(_of_layers(path, public))
    mean, own = features.mean(0), features.std(0)
    deviation = own if classifies else np.sqrt(np.mean(own**2))
    scaled = np.clip((features - mean) / deviation, -6, 6)
    centre = scaled.mean(0)
    values, vectors = np.linalg.eigh(np.cov((scaled - centre).T, bias=True))
    leading = np.argsort(-values)[:12]
    found = np.clip((np.sqrt(_of_layers(path, images)) - mean) / deviation, -6, 6) - centre
    found = found @ vectors[:, leading] / values[leading] ** (0.25 if classifies else 0.5)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.long
@pytest.mark.parametrize("classifies", [False, True])
def test_features_are_joined_taps_of_both_mirror_images_whitened_by_public_images(file, classifies):
    public, images = _leaves(), _leaves(7, seed=3)
    backbone = import_backbone(file, MODEL)
    assert needs_public_images(backbone)
    assert fit_features(backbone, public, classifies=classifies) == 96
    trunk, rest = cut(backbone, "projection")
    found = np.asarray(trunk(preprocess(images)))
    wanted = _by_hand(file, public, images, classifies)
    np.testing.assert_allclose(np.abs(found), np.abs(wanted), atol=2e-3)  # axes have no sign
    assert rest.output_shape == (None, 8)
    names = [v.path for v in trainable_variables(backbone, "projection")]
    assert names == ["embedding/kernel"]


@pytest.mark.long
def test_network_output_is_that_of_the_file(file):
    images = preprocess(_leaves(7, seed=3))
    wanted = keras.saving.load_model(file, compile=False)(images)
    for changes in ({}, {"taps": ()}, {"taps": ("pool",), "principal_directions": 0}):
        model = MODEL.model_copy(update=changes)
        found = network_output(import_backbone(file, model, pixels="-1..1"))
        np.testing.assert_allclose(found(images), wanted, atol=1e-5)


def test_changed_features_of_an_import_are_compared_with_the_network_output():
    config = load_config("cars_whitening")
    assert "network_output" in baselines_of(config)
    plain = {"taps": (), "square_root": False, "principal_directions": 0}
    model = config.model.model_copy(update=plain)
    assert "network_output" not in baselines_of(config.model_copy(update={"model": model}))


def test_tap_that_does_not_exist_is_refused_with_those_that_do(file):
    model = MODEL.model_copy(update={"taps": ("last_block",)})
    with pytest.raises(ConfigError, match=r"has no layer 'last_block'.*pool"):
        import_backbone(file, model)


@pytest.mark.long
def test_step_takes_constants_from_public_images_and_reports_their_number(
    file, tmp_path, monkeypatch
):
    seen = []

    def read(source, reader, most, seed):
        seen.append((source.uri, most, seed))
        return _leaves(most), np.full(most, "")

    monkeypatch.setattr(sources, "read_public_images", read)
    public = SourceConfig(uri="public.parquet")
    start = BackboneConfig(
        model=MODEL,
        pretraining=PretrainingConfig(
            kind="import", import_path=str(file), source=public, constant_images=50
        ),
        seed=3,
    )
    keys = open_key_store(str(tmp_path / "keys"))
    card = pretrain_public.run(start, tmp_path / "start", keys)
    assert seen == [("public.parquet", 50, 3)]
    assert card["constant_images"] == 50
    again = pretrain_public.run(start, tmp_path / "again", keys)
    assert again["weights_sha"] == card["weights_sha"]
    without = start.model_copy(
        update={"pretraining": start.pretraining.model_copy(update={"source": None})}
    )
    with pytest.raises(ConfigError, match=r"pretraining\.source is missing"):
        pretrain_public.run(without, tmp_path / "none", keys)
    few = start.model_copy(
        update={"pretraining": start.pretraining.model_copy(update={"constant_images": 12})}
    )
    with pytest.raises(ConfigError, match="need more than 12 public images"):
        pretrain_public.run(few, tmp_path / "few", keys)
    backbone = load_backbone(tmp_path / "start" / "backbone.keras", MODEL)
    check_import(tmp_path / "start" / "backbone.keras", "projection")
    assert backbone.output_shape == (None, 8)


@pytest.mark.parametrize(("classes", "used"), [(("light", "dark"), 120), (("light", "blue"), 0)])
def test_head_starts_from_public_images_with_every_class(
    classes, used, file, tmp_path, monkeypatch
):
    images = _leaves(240)
    light = images.mean((1, 2, 3)) > np.median(images.mean((1, 2, 3)))
    names = np.where(light, "light", "dark")
    names[100:120] = ""
    monkeypatch.setattr(sources, "read_public_images", lambda *_: (images[:140], names[:140]))
    shape = {"embedding_dim": 12, "projection": False, "trainable": "head", "classes": classes}
    public = SourceConfig(uri="public.parquet")
    start = BackboneConfig(
        model=MODEL.model_copy(update=shape),
        pretraining=PretrainingConfig(kind="import", import_path=str(file), source=public),
        seed=3,
    )
    card = pretrain_public.run(start, tmp_path, open_key_store(str(tmp_path / "keys")))
    assert card["head_images"] == used
    found = classify(load_backbone(tmp_path / "backbone.keras", start.model), images[140:], 64)
    right = ((found[:, 0] > 0.5) == light[140:]).mean()
    assert right > 0.8 if used else (found == 0.5).all()


def test_public_image_sample_is_seeded_and_includes_all_of_a_small_set(tmp_path):

    folder = tmp_path / "photos" / "one"
    folder.mkdir(parents=True)
    for number, image in enumerate(_leaves(20)):
        (folder / f"{number:02d}.png").write_bytes(encode_png(image))
    source = SourceConfig(uri=str(tmp_path / "photos"))
    reader = PhotoReader(*MODEL.photo)
    some, again, other = (
        sources.read_public_images(source, reader, 8, seed)[0] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(some, again)
    assert some.shape == (8, 16, 16, 3)
    assert (some != other).any()
    assert len(sources.read_public_images(source, reader, 100)[0]) == 20


def _whole(file, weight=1.5):
    backbone = import_backbone(file, MODEL)
    fit_features(backbone, _leaves())
    return with_public_features(backbone, weight), backbone


@pytest.mark.long
def test_embedding_is_the_projection_then_the_weighted_public_features(file, tmp_path):
    model = MODEL.model_copy(update={"keep_public_features": 1.5})
    whole, backbone = _whole(file)
    images = _leaves(6, seed=8)
    scaled = preprocess(images)
    joined = np.asarray(whole(scaled))
    trunk, rest = cut(backbone, "projection")
    features = np.asarray(trunk(scaled))
    private = np.array(rest(features))
    private /= np.linalg.norm(private, axis=1, keepdims=True)
    np.testing.assert_allclose(joined[:, :8], private, atol=1e-5)
    np.testing.assert_allclose(joined[:, 8:], 1.5 * features, atol=1e-5)
    path = tmp_path / "backbone.keras"
    save_backbone(whole, path)
    loaded = load_backbone(path, model)
    np.testing.assert_array_equal(np.asarray(loaded(scaled)), joined)
    assert load_whitelisted(path, path, model).output_shape == (None, 20)
    with pytest.raises(ConfigError, match="wanted"):
        load_backbone(path, MODEL)
    shown = SharedFeatures({"model": loaded}, "projection", embed)(images, 4)["model"]
    np.testing.assert_allclose(shown, joined / np.sqrt(1 + 1.5**2), atol=1e-5)
    save_for_serving(loaded, model, tmp_path / "saved_model")
    check_import(path, "projection")


@pytest.mark.long
def test_private_training_updates_only_the_projection(file):
    whole, _ = _whole(file)
    assert without_public_features(whole).output_shape == (None, 8)
    model = MODEL.model_copy(update={"keep_public_features": 1.5})
    mechanism = noiseless(1.0)
    training = TrainingConfig(local=LocalTrainingConfig(augmentation=None))
    function, trunk = build_rounds(whole, mechanism, model, training, workers=1)
    assert function.dim == 12 * 8
    assert trunk.output_shape == (None, 12)


@pytest.mark.long
def test_release_with_other_constants_than_the_public_backbone_is_refused(file, tmp_path):
    """As if the constants of features had been computed from private images."""
    model = MODEL.model_copy(update={"keep_public_features": 1.5})
    whole, backbone = _whole(file)
    save_backbone(whole, tmp_path / "start.keras")
    kernel = backbone.get_layer("embedding").kernel
    kernel.assign(kernel + 1.0)
    save_backbone(whole, tmp_path / "trained.keras")
    load_whitelisted(tmp_path / "trained.keras", tmp_path / "start.keras", model)
    fit_features(backbone, _leaves(seed=9))
    save_backbone(whole, tmp_path / "fitted.keras")
    with pytest.raises(Refused, match="public_constants"):
        load_whitelisted(tmp_path / "fitted.keras", tmp_path / "start.keras", model)


def test_settings_without_effect_or_without_public_images_are_refused():
    text = load_config("omniglot_identities").model_dump(mode="json")
    public = {**text["pretraining"], "kind": "import", "import_path": "net.keras"}

    def refused(message, model, pretraining=public):
        tree = text | {"model": text["model"] | model, "pretraining": pretraining}
        with pytest.raises(ValueError, match=message):
            RunConfig.model_validate(tree)

    refused("model.taps applies to an imported", {"taps": ["head"]}, text["pretraining"])
    both = {"principal_directions": 3, "whitened_directions": 3}
    refused("exclude each other", both)
    refused("pretraining.source is missing", {"square_root": True}, public | {"source": None})
    refused("keeps the features that a projection reads", {"keep_public_features": 1.0})
    head = {"trainable": "head", "principal_directions": 3}
    with_images = public | {"source": {"uri": "photos.parquet"}}
    refused("model.embedding_dim=16 differs", head | {"embedding_dim": 16}, with_images)


def test_only_the_public_step_computes_constants():
    """Constants of private images would reach the release without noise."""
    found = {
        str(path.relative_to(COMPONENTS))
        for path in COMPONENTS.rglob("*.py")
        if re.search(r"fit_\w+\(|read_public_images\(", path.read_text())
    }
    assert found == {"steps/pretrain_public.py", "data/sources.py", "models/public_features.py"}


# ---- Features brought to one size by constants of drawn images ----


MODEL_WHITENED = ModelConfig(
    backbone="scatter_linear",
    projection=False,
    image_size=16,
    embedding_dim=4 * 2 * 81,
    whitened_directions=12,
    mirrored=True,
)
CLASSIFIER = MODEL_WHITENED.model_copy(update={"classes": ("this", "that"), "trainable": "head"})


def _drawn(count=80, seed=0):
    return drawn_images(count, 16, 1, seed)


def test_whitening_shrinks_the_largest_directions_to_the_next_eigenvalue():
    """Against the covariance itself, on the images that the constants are of."""
    random = np.random.default_rng(0)
    features = random.normal(size=(60, 2, 2, 5)) * np.array([9.0, 5.0, 1.0, 1.0, 1.0])
    features += random.normal(size=(60, 1, 1, 1)) * 7
    mean, scale, centre, axes, kept = constants(features, 3)
    flat = np.clip((features - mean) * scale, -6, 6).reshape(60, -1) - centre
    before = np.linalg.eigvalsh(np.cov(flat.T, bias=True))[::-1]
    after = np.linalg.eigvalsh(np.cov((flat - flat @ axes * (1 - kept) @ axes.T).T, bias=True))
    wanted = np.sort(np.concatenate([np.full(3, before[3]), before[3:]]))
    np.testing.assert_allclose(after, wanted, atol=1e-8 * before[0])


def test_whitened_backbone_keeps_its_constants_and_returns_unit_vectors(tmp_path):
    start = BackboneConfig(
        model=CLASSIFIER, pretraining=PretrainingConfig(constant_images=64), seed=1
    )
    keys = open_key_store(str(tmp_path / "keys"))
    card = pretrain_public.run(start, tmp_path / "start", keys)
    assert (card["images"], card["constant_images"]) == (0, 64)
    backbone = without_head(load_backbone(tmp_path / "start" / "backbone.keras", CLASSIFIER))
    assert not backbone.trainable_variables
    found = backbone(preprocess(_drawn(3, seed=9))).numpy()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    bare = build_backbone(MODEL_WHITENED, 1)
    assert np.abs(bare(preprocess(_drawn(3, seed=9))) - found).max() > 1e-3
    assert fit_constants(bare, _drawn(64, seed=1)) == 1
    np.testing.assert_allclose(bare(preprocess(_drawn(3, seed=9))), found, atol=1e-4)


def test_mirrored_is_refused_for_networks_without_mirrored_features():
    with pytest.raises(ConfigError, match=r"model\.mirrored: resnet8 has no mirrored features"):
        build_backbone(MODEL_WHITENED.model_copy(update={"backbone": "resnet8"}), 0)


@pytest.mark.long
def test_import_with_the_wrong_mirrored_setting_is_refused(tmp_path):
    for mirrored in (True, False):
        dim = 4 * (2 if mirrored else 4) * 81
        changed = {"whitened_directions": 0, "mirrored": mirrored, "embedding_dim": dim}
        model, file = MODEL_WHITENED.model_copy(update=changed), tmp_path / f"{mirrored}.keras"
        save_backbone(build_backbone(model, 0), file)
        import_backbone(file, model)
        with pytest.raises(ConfigError, match="is not what"):
            import_backbone(file, model.model_copy(update={"mirrored": not mirrored}))


# ---- What a file tells of the pixels that its net was trained on ----


def test_pixel_range_is_known_only_for_networks_of_this_package(tmp_path):
    path = tmp_path / "net.keras"
    build_backbone(ModelConfig(backbone="tiny", image_size=12), 0).save(path)
    assert known_pixels(path) == ("-1..1", "tiny of this package")

    def of(*layers, name="mine"):
        shape = keras.Input((12, 12, 1))
        end = keras.layers.GlobalAveragePooling2D()
        keras.Sequential([shape, *layers, end], name=name).save(path)
        return known_pixels(path)

    assert of(keras.layers.Conv2D(2, 3)) is None
    assert of(keras.layers.Conv2D(2, 3), name="tiny") is None
    bytes_first = keras.layers.Rescaling(1 / 127.5, offset=-1, name="scaled")
    assert of(bytes_first) == ("0..255", "its layer scaled")
    assert of(keras.layers.Rescaling(2.0, offset=-1)) is None
    assert of(keras.layers.Normalization(mean=[0.5], variance=[1.0]), name="resnet50") is None
