"""Gradients are added up in one order: what TensorFlow runs holds no sum that takes any."""

from contextlib import nullcontext

import numpy as np
import pytest

from fedemb.config import LocalTrainingConfig, ModelConfig, PretrainingConfig, UnitGradientConfig
from fedemb.models.backbones import build_backbone, trainable_variables
from fedemb.training import tensorflow_clients as rounds
from fedemb.training.central import pretrain
from fedemb.training.tensorflow_clients import RoundFunction, gradients_summed_in_order
from fedemb.training.units import UnitGradientFunction
from tests.kit.privacy_worlds import noiseless

MODEL = ModelConfig(
    backbone="resnet8_ws", image_size=8, channels=3, embedding_dim=16, classes=tuple("abc")
)
"""Three gradients or more meet at its activations and kernels."""


def _function(kind):
    mechanism = noiseless(1.0)
    net = build_backbone(MODEL, 1)
    if kind == "clients":
        return RoundFunction(net, mechanism, LocalTrainingConfig())
    variables = trainable_variables(net, "all")
    return UnitGradientFunction(net, mechanism, UnitGradientConfig(), variables=variables)


def _sums_in_any_order(function):
    """How many there are after TensorFlow's optimizer of graphs, bodies of loops included."""
    import tensorflow as tf
    from tensorflow.python.grappler import tf_optimizer

    graph = function.get_concrete_function().graph
    found = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    for output in tf.nest.flatten(graph.structured_outputs):
        found.collection_def["train_op"].node_list.value.append(output.name)
    optimized = tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), found)
    nodes = [*optimized.node, *(n for f in optimized.library.function for n in f.node_def)]
    assert any(node.op == "AddN" for node in nodes)
    terms = [
        len([name for name in node.input if not name.startswith("^")])
        for node in nodes
        if node.op == "AddN"
    ]
    return sum(count > 2 for count in terms)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clients", "units"])
def test_no_sum_of_a_round_takes_its_terms_in_any_order(kind):
    assert _sums_in_any_order(_function(kind)._train) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clients", "units"])
def test_planted_gradients_left_to_tensorflow_are_seen(kind, monkeypatch):
    monkeypatch.setattr(rounds, "gradients_summed_in_order", nullcontext)
    assert _sums_in_any_order(_function(kind)._train) > 5


@pytest.fixture
def terms(monkeypatch):
    """How many terms TensorFlow was left to add up, inside `gradients_summed_in_order` alone."""
    from tensorflow.python.eager import backprop

    usual, seen = backprop._aggregate_grads, []
    monkeypatch.setattr(
        backprop, "_aggregate_grads", lambda given: seen.append(len(given)) or usual(given)
    )
    return seen


@pytest.mark.long
def test_training_without_privacy_adds_them_in_one_order_too(terms):
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), np.uint8)
    schedule = PretrainingConfig(epochs=1, batch_size=4, learning_rate=0.1, augmentation=None)
    pretrain(build_backbone(MODEL, 1), images, np.arange(8) % 2, schedule, seed=0)
    assert max(terms) == 2


def test_gradients_are_those_of_tensorflow_and_the_usual_sum_is_back_afterwards(terms):
    import tensorflow as tf

    x = tf.constant(np.random.default_rng(0).normal(size=100).astype(np.float32))

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x)
            value = tf.reduce_sum(x * x + tf.cos(x) * y + tf.exp(y))
        return tape.gradient(value, x)

    usual = gradient()
    with gradients_summed_in_order():
        np.testing.assert_allclose(gradient(), usual, rtol=1e-5, atol=1e-6)
    assert terms == [2]  # of y; x has five
    np.testing.assert_array_equal(gradient(), usual)
    assert terms == [2]
