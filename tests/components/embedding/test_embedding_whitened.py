"""Features brought to one size by constants of drawn images."""

import numpy as np
import pytest

from fedemb.config import ModelConfig, PretrainingConfig, PublicStart
from fedemb.data.drawn_images import drawn_images
from fedemb.data.pixels import encode_png
from fedemb.engine import build_backbone, load_backbone, save_backbone
from fedemb.errors import ConfigError
from fedemb.keys import open_key_store
from fedemb.models.backbones.build import learned_parts
from fedemb.models.classifier import without_head
from fedemb.models.imported import check_import, import_backbone
from fedemb.models.preprocessing import preprocess
from fedemb.models.whitened import constants, fit_constants
from fedemb.steps.pretrain_public import pretrain
from tests.kit.pipeline_runs.partition_run import write_parquet

MODEL = ModelConfig(
    backbone="scatter_linear",
    projection=False,
    image_size=16,
    embedding_dim=4 * 2 * 81,
    whitened_directions=12,
    mirrored=True,
)
CLASSIFIER = MODEL.model_copy(update={"classes": ("this", "that"), "trainable": "head"})


def _drawn(count=80, seed=0):
    return drawn_images(count, 16, 1, seed)


def test_largest_directions_are_brought_to_the_size_of_the_next():
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


def test_backbone_keeps_its_constants_and_gives_vectors_of_length_one(tmp_path):
    start = PublicStart(
        model=CLASSIFIER,
        pretraining=PretrainingConfig(constant_images=64),
        seed=1,
    )
    keys = open_key_store(str(tmp_path / "keys"))
    card = pretrain.run(start, tmp_path / "start", keys)
    assert (card["images"], card["constant_images"]) == (0, 64)
    backbone = without_head(load_backbone(tmp_path / "start" / "backbone.keras", CLASSIFIER))
    assert not backbone.trainable_variables
    found = backbone(preprocess(_drawn(3, seed=9))).numpy()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    bare = build_backbone(MODEL, 1)
    assert np.abs(bare(preprocess(_drawn(3, seed=9))) - found).max() > 1e-3
    assert fit_constants(bare, _drawn(64, seed=1)) == 1
    np.testing.assert_allclose(bare(preprocess(_drawn(3, seed=9))), found, atol=1e-4)


def test_features_of_an_image_depend_on_no_other():
    backbone = build_backbone(MODEL, 0)
    fit_constants(backbone, _drawn())
    images = preprocess(_drawn(5, seed=3))
    together = backbone(images).numpy()
    alone = np.concatenate([backbone(images[i : i + 1]).numpy() for i in range(5)])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_drawn_images_are_what_the_seed_says():
    images = drawn_images(12, 16, 3, 5)
    np.testing.assert_array_equal(images, drawn_images(12, 16, 3, 5))
    assert images.shape == (12, 16, 16, 3)
    assert (images != drawn_images(12, 16, 3, 6)).mean() > 0.9
    assert len({image.tobytes() for image in images}) == 12


NET = ModelConfig(
    backbone="resnet8_wide",
    projection=False,
    image_size=16,
    embedding_dim=1280,
    whitened_directions=12,
    mirrored=True,
)


def test_a_mirrored_net_gives_the_mean_over_an_image_and_its_mirror_image(tmp_path):
    mirrored = build_backbone(NET.model_copy(update={"whitened_directions": 0}), 3)
    plain = build_backbone(NET.model_copy(update={"whitened_directions": 0, "mirrored": False}), 3)
    images = preprocess(_drawn(6, seed=9))
    (net,) = learned_parts(mirrored)
    assert net.count_params() == mirrored.count_params() == plain.count_params()
    assert all(np.ptp(layer.get_weights()[0]) > 0 for layer in net.layers if "conv" in layer.name)
    net.set_weights(plain.get_weights())
    wanted = (plain(images).numpy() + plain(images[:, :, ::-1]).numpy()) / 2
    np.testing.assert_allclose(mirrored(images).numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert np.abs(plain(images).numpy() - wanted).max() > 1e-3
    other = build_backbone(NET.model_copy(update={"whitened_directions": 0}), 4)
    assert np.abs(other(images).numpy() - mirrored(images).numpy()).max() > 1e-3


@pytest.mark.long
def test_a_mirrored_net_is_trained_in_public_once_for_each_image_and_loads_again(tmp_path):
    model = NET.model_copy(update={"classes": ("this", "that"), "trainable": "head"})
    rows = [
        {"image": encode_png(image), "user_id": str(n), "label": str(n % 4)}
        for n, image in enumerate(_drawn(64))
    ]
    source = {"uri": write_parquet(tmp_path / "public.parquet", rows)}
    recipe = PretrainingConfig(kind="supervised", source=source, epochs=1)
    start = PublicStart(model=model, pretraining=recipe, seed=1)
    pretrain.run(start, tmp_path / "start", open_key_store(str(tmp_path / "keys")))
    backbone = without_head(load_backbone(tmp_path / "start" / "backbone.keras", model))
    images = preprocess(_drawn(3, seed=9))
    found = backbone(images).numpy()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(backbone(images[:, :, ::-1]).numpy(), found, atol=1e-4)
    check_import(tmp_path / "start" / "backbone.keras", "head")  # it may be the start of others
    untrained = without_head(build_backbone(model, 1))
    (before,), (after,) = learned_parts(untrained), learned_parts(backbone)
    assert [v.path for v in after.weights] == [v.path for v in before.weights]
    assert np.abs(after.get_weights()[0] - before.get_weights()[0]).max() > 1e-4


def test_joined_parts_are_mirrored_each_and_other_nets_refuse():
    joined = ModelConfig(
        backbone="resnet8_wide+scatter_linear",
        projection=False,
        image_size=16,
        embedding_dim=1280 + 4 * 2 * 81,
        mirrored=True,
    )
    backbone = build_backbone(joined, 0)
    images = preprocess(_drawn(3, seed=9))
    turned, found = backbone(images[:, :, ::-1]).numpy(), backbone(images).numpy()
    np.testing.assert_allclose(turned[:, :1280], found[:, :1280], atol=1e-4)
    assert [part.name for part in learned_parts(backbone)] == ["net"]
    with pytest.raises(ConfigError, match=r"model\.mirrored: resnet8 has no mirrored features"):
        build_backbone(joined.model_copy(update={"backbone": "resnet8+scatter_linear"}), 0)


def test_public_training_leaves_no_weight_out():
    projected = {"whitened_directions": 0, "projection": True, "embedding_dim": 8}
    backbone = build_backbone(NET.model_copy(update=projected), 0)
    (part,) = learned_parts(backbone)
    assert part is backbone


@pytest.mark.long
def test_file_that_sees_mirror_images_and_one_that_does_not_are_told_apart(tmp_path):
    for mirrored in (True, False):
        model = NET.model_copy(update={"whitened_directions": 0, "mirrored": mirrored})
        file = tmp_path / f"{mirrored}.keras"
        save_backbone(build_backbone(model, 0), file)
        import_backbone(file, model)
        with pytest.raises(ConfigError, match="is not what"):
            import_backbone(file, model.model_copy(update={"mirrored": not mirrored}))
