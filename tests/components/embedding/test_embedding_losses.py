"""Losses against their formulas in numpy, float64."""

import numpy as np
import pytest
import tensorflow as tf

from fedemb.config import LossConfig
from fedemb.models.losses import build_loss

RANDOM = np.random.default_rng(7)
EMBEDDINGS = RANDOM.normal(size=(9, 5))
HEAD = RANDOM.normal(size=(4, 5))
LABELS = np.array([0, 1, 2, 3, 0, 1, 2, 0, 0])


def _cross_entropy(logits, labels):
    shifted = logits - logits.max(1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return -log_probabilities[np.arange(len(labels)), labels].mean()


def _unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _expected(kind, scale, margin):
    cosine = _unit(EMBEDDINGS) @ _unit(HEAD).T
    true = np.eye(len(HEAD))[LABELS].astype(bool)
    if kind == "softmax":
        return _cross_entropy(EMBEDDINGS @ HEAD.T, LABELS)
    if kind == "normalized_softmax":
        return _cross_entropy(scale * cosine, LABELS)
    if kind == "cosface":
        return _cross_entropy(scale * (cosine - margin * true), LABELS)
    angle = np.arccos(cosine)
    lowered = np.where(
        angle + margin < np.pi, np.cos(angle + margin), cosine - margin * np.sin(margin)
    )
    return _cross_entropy(scale * np.where(true, lowered, cosine), LABELS)


def _loss(config, embeddings=EMBEDDINGS, head=HEAD, labels=LABELS):
    arguments = tf.constant(embeddings, tf.float32), tf.constant(head, tf.float32)
    return build_loss(config)(*arguments, tf.constant(labels, tf.int32))


@pytest.mark.parametrize("kind", ["softmax", "normalized_softmax", "cosface", "arcface"])
@pytest.mark.parametrize(("scale", "margin"), [(16.0, 0.2), (3.0, 1.5)])
def test_classification_loss_follows_its_formula(kind, scale, margin):
    config = LossConfig(kind=kind, scale=scale, margin=margin)
    np.testing.assert_allclose(_loss(config), _expected(kind, scale, margin), rtol=2e-5)


def test_triplet_loss_takes_the_hardest_of_each_anchor():
    unit, margin = _unit(EMBEDDINGS), 0.4
    distances = np.linalg.norm(unit[:, None] - unit[None], axis=2)
    hinges = []
    for anchor, label in enumerate(LABELS):
        same = (label == LABELS) & (np.arange(len(LABELS)) != anchor)
        if same.any() and (label != LABELS).any():
            hardest = distances[anchor, same].max() - distances[anchor, label != LABELS].min()
            hinges.append(max(0.0, hardest + margin))
    assert len(hinges) == 8  # class 3 has one example, so it is not an anchor
    config = LossConfig(kind="triplet", margin=margin)
    np.testing.assert_allclose(_loss(config), np.mean(hinges), rtol=2e-5)


def test_triplet_loss_without_an_anchor_is_zero():
    config = LossConfig(kind="triplet")
    assert float(_loss(config, labels=np.zeros(9, int))) == 0
    assert float(_loss(config, EMBEDDINGS[:3], labels=np.arange(3))) == 0


@pytest.mark.parametrize("kind", ["normalized_softmax", "arcface", "cosface", "triplet"])
def test_gradients_stay_finite_where_angles_degenerate(kind):
    # Identical, opposite and zero vectors: where naive arccos and sqrt have infinite slopes.
    embeddings = tf.constant([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    head = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    with tf.GradientTape() as tape:
        tape.watch([embeddings, head])
        value = build_loss(LossConfig(kind=kind))(embeddings, head, tf.constant([0, 0, 1, 1]))
    gradients = tape.gradient(value, [embeddings])
    assert all(np.isfinite(g).all() for g in gradients)
