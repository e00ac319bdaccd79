"""Several models evaluate the same images; shared layers compute once."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.models import inference
from fedemb.models.backbones import cut
from fedemb.models.inference import SharedFeatures, classify, embed, raw_pixels
from fedemb.training import build_backbone

CLASSES = ("a", "b", "c")


def with_another_end(model, seed):
    """The same net, but for its last layer."""
    import keras

    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    last = other.layers[-1]
    random = np.random.default_rng(seed)
    last.set_weights([random.normal(size=w.shape) for w in last.get_weights()])
    return other


@pytest.mark.parametrize(
    ("group", "apply", "classes"), [("projection", embed, ()), ("head", classify, CLASSES)]
)
def test_a_shared_trunk_computes_once_and_changes_nothing(group, apply, classes, monkeypatch):
    config = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8, classes=classes)
    start = build_backbone(config, 0)
    models = {
        "model": with_another_end(start, 1),
        "public_backbone": start,
        "untrained": build_backbone(config, 7),
    }
    if not classes:
        models["raw_pixels"] = raw_pixels(config)
        models["frozen_features"] = cut(start, group)[0]
    images = np.random.default_rng(0).integers(0, 256, (37, 12, 12, 1), np.uint8)
    wanted = {name: apply(model, images, 16) for name, model in models.items()}
    computed: list[object] = []
    honest = inference.outputs
    monkeypatch.setattr(
        inference,
        "outputs",
        lambda model, examples, *more: (
            (examples.ndim == 4 and computed.append(model)) or honest(model, examples, *more)
        ),
    )
    shown = SharedFeatures(models, group, apply)
    found = shown(images, 16)
    shared = 1 if classes else 2
    assert len(computed) == len(models) - shared, "model, start and features have one trunk"
    assert set(found) == set(models)
    for name in models:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-6)


def test_a_trunk_that_trained_is_not_taken_for_that_of_the_start():
    config = ModelConfig(backbone="tiny", image_size=12, embedding_dim=8)
    start = build_backbone(config, 0)
    moved = with_another_end(start, 1)
    moved.weights[0].assign(moved.weights[0] + 1e-6)
    assert len(SharedFeatures({"a": start, "b": moved}, "projection", embed).trunks) == 2
    assert not SharedFeatures({"a": start, "b": moved}, "all", embed).trunks
