"""Several backbones side by side under one head."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.engine import build_backbone, load_backbone, save_backbone, trainable_variables
from fedemb.errors import ConfigError
from fedemb.models.backbones.build import learned_parts
from fedemb.models.classifier import without_head

SCATTERED = 4 * 4 * 81
MODEL = ModelConfig(
    backbone="scatter_linear+resnet8",
    image_size=16,
    embedding_dim=SCATTERED + 64,
    classes=("a", "b", "c"),
)


def _images(count=2):
    return np.random.default_rng(0).uniform(-1, 1, (count, 16, 16, 1)).astype(np.float32)


def test_features_of_each_part_stand_side_by_side_at_length_one():
    features = without_head(build_backbone(MODEL, 3))(_images()).numpy()
    for part, found, seed in (
        ("scatter_linear", features[:, :SCATTERED], 3),
        ("resnet8", features[:, SCATTERED:], 4),
    ):
        alone = MODEL.model_copy(
            update={
                "backbone": part,
                "projection": False,
                "classes": (),
                "embedding_dim": found.shape[1],
            }
        )
        wanted = build_backbone(alone, seed)(_images()).numpy()
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_what_trains_is_named_as_for_one_backbone():
    classifier = build_backbone(MODEL, 0)

    def paths(group):
        return {v.path.split("/")[0] for v in trainable_variables(classifier, group)}

    assert paths("head") == {"logits"}
    assert paths("all") >= {"logits", "stem_conv", "block1_1_norm1", "block3_1_conv1"}
    assert "stem_conv" not in paths("norm_only")
    assert "block3_1_norm2" in paths("norm_only")
    later = paths("first_blocks_frozen")
    assert not {"stem_conv", "block1_1_conv1"} & later
    assert "block2_1_conv1" in later


def test_public_pretraining_trains_the_parts_that_learn():
    (learned,) = learned_parts(without_head(build_backbone(MODEL, 0)))
    assert learned.name == "resnet8"
    one = MODEL.model_copy(update={"backbone": "tiny", "embedding_dim": 8})
    (whole,) = learned_parts(without_head(build_backbone(one, 0)))
    assert len(whole.trainable_variables) == len(build_backbone(one, 0).trainable_variables) - 2


def test_joined_backbone_comes_back_from_its_file(tmp_path):
    classifier = build_backbone(MODEL, 5)
    save_backbone(classifier, tmp_path / "backbone.keras")
    again = without_head(load_backbone(tmp_path / "backbone.keras", MODEL))
    np.testing.assert_array_equal(again(_images()), without_head(classifier)(_images()))


def test_joined_length_that_does_not_fit_is_told():
    with pytest.raises(ConfigError, match=rf"\(None, {SCATTERED + 64}\)"):
        build_backbone(MODEL.model_copy(update={"embedding_dim": 9}), 0)
