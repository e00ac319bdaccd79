"""Features brought to one size by constants of drawn images."""

import numpy as np
import pytest

from fedemb.config import ModelConfig, PretrainingConfig, PublicStart
from fedemb.data.builtin import drawn_images
from fedemb.errors import ConfigError
from fedemb.keys import open_key_store
from fedemb.models.backbones import without_head
from fedemb.models.imported import import_backbone
from fedemb.models.keras_backend import preprocess
from fedemb.models.layers import constants, fit_constants
from fedemb.steps import pretrain_public
from fedemb.training import build_backbone, load_backbone, save_backbone

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
    card = pretrain_public.run(start, tmp_path / "start", keys)
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


def test_networks_without_mirrored_features_refuse():
    with pytest.raises(ConfigError, match=r"model\.mirrored: resnet8 has no mirrored features"):
        build_backbone(MODEL.model_copy(update={"backbone": "resnet8"}), 0)


@pytest.mark.long
def test_file_that_sees_mirror_images_and_one_that_does_not_are_told_apart(tmp_path):
    for mirrored in (True, False):
        dim = 4 * (2 if mirrored else 4) * 81
        changed = {"whitened_directions": 0, "mirrored": mirrored, "embedding_dim": dim}
        model, file = MODEL.model_copy(update=changed), tmp_path / f"{mirrored}.keras"
        save_backbone(build_backbone(model, 0), file)
        import_backbone(file, model)
        with pytest.raises(ConfigError, match="is not what"):
            import_backbone(file, model.model_copy(update={"mirrored": not mirrored}))
