import numpy as np
import pytest
import tensorflow as tf

from fedemb.config import LossConfig, ServerConfig
from fedemb.models.losses import build_loss
from fedemb.training.server import initial_state, learning_rate, released_weights, server_step

MEANS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def _run(config, means=MEANS):
    state = initial_state(np.ones(3, np.float32))
    history = []
    for mean in means:
        state = server_step(config, state, mean, rounds=len(means))
        history.append(state.weights)
    return state, history


def test_sgd_with_momentum_moves_along_the_mean():
    state, _ = _run(ServerConfig(learning_rate=0.5, momentum=0.9, ema_decay=0))
    weights, slot = np.ones(3), np.zeros(3)
    for mean in MEANS:
        slot = 0.9 * slot + mean
        weights = weights + 0.5 * slot
    np.testing.assert_allclose(state.weights, weights, rtol=1e-6)
    assert state.weights.dtype == np.float32
    assert state.rounds == 5


def test_released_weights_are_the_unbiased_average():
    config = ServerConfig(ema_decay=0.7)
    state, history = _run(config)
    factors = 0.3 * 0.7 ** np.arange(4, -1, -1)
    expected = np.tensordot(factors / factors.sum(), np.array(history), 1)
    np.testing.assert_allclose(released_weights(config, state), expected, rtol=1e-5)
    start = initial_state(np.ones(3, np.float32))
    np.testing.assert_array_equal(released_weights(config, start), 1)
    plain = ServerConfig(ema_decay=0)
    assert released_weights(plain, state) is state.weights


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_decay_over_all_rounds(schedule, expected):
    config = ServerConfig(learning_rate=1, schedule=schedule)
    rates = [learning_rate(config, index, 4) for index in range(4)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_the_step_does_not_depend_on_the_clip_once_rescaled():
    config = ServerConfig(rescale_to_unit_norm=True)
    start = initial_state(np.ones(3, np.float32))
    small, large = (
        server_step(config, start, clip * MEANS[0], rounds=5, l2_norm_clip=clip).weights
        for clip in (0.1, 4.0)
    )
    np.testing.assert_allclose(small, large, rtol=1e-6)


# ---- Losses against their formulas in numpy, float64 ----


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
    return _cross_entropy(scale * (cosine - margin * true), LABELS)


def _loss(config, embeddings=EMBEDDINGS, head=HEAD, labels=LABELS):
    arguments = tf.constant(embeddings, tf.float32), tf.constant(head, tf.float32)
    return build_loss(config)(*arguments, tf.constant(labels, tf.int32))


@pytest.mark.parametrize("kind", ["softmax", "normalized_softmax", "cosface"])
@pytest.mark.parametrize(("scale", "margin"), [(16.0, 0.2), (3.0, 1.5)])
def test_classification_loss_follows_its_formula(kind, scale, margin):
    config = LossConfig(kind=kind, scale=scale, margin=margin)
    np.testing.assert_allclose(_loss(config), _expected(kind, scale, margin), rtol=2e-5)


@pytest.mark.parametrize("kind", ["normalized_softmax", "cosface"])
def test_gradients_are_finite_at_degenerate_angles(kind):
    # Identical, opposite and zero vectors: where naive arccos and sqrt have infinite slopes.
    embeddings = tf.constant([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    head = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    with tf.GradientTape() as tape:
        tape.watch([embeddings, head])
        value = build_loss(LossConfig(kind=kind))(embeddings, head, tf.constant([0, 0, 1, 1]))
    gradients = tape.gradient(value, [embeddings])
    assert all(np.isfinite(g).all() for g in gradients)
