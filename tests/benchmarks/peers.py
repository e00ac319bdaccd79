"""A round of W1 or a step of W3 by other libraries, on the networks of `bench_rounds.py`.

Without accountants and data loading. Imports one library at a time: each lock in `peers/` has its
own environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.benchmarks.tiny import TINY

CLIENTS, EXAMPLES, ROWS, BATCH, EPOCHS, UNITS, CLASSES, RATE = 16, 128, 64, 32, 4, 256, 10, 0.02
if TINY:
    CLIENTS, EXAMPLES, UNITS = 2, 32, 16
NAMES = tuple(map(str, range(CLASSES)))
NET: Any = dict(backbone="resnet8", image_size=32, channels=3, embedding_dim=64, projection=False)
"""The network of W3, without its head."""
Act = Callable[[], object]


def _photos(count: int, size: int, channels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(0).normal(size=(count, size, size, channels))
    return pixels.astype(np.float32), np.arange(count) % classes


def _for_torch(*how: int) -> list[Any]:
    import torch

    images, classes = map(torch.from_numpy, _photos(*how))
    return [images.permute(0, 3, 1, 2).contiguous(), classes]


def opacus() -> Act:
    """W3: hooks compute the gradient of each image."""
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from torch import nn

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> Any:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(layer, nn.GroupNorm(8, outputs))

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            last = conv(outputs, outputs, 3)
            self.main = nn.Sequential(conv(inputs, outputs, 3, stride), nn.ReLU(), last)
            self.side = conv(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x: Any) -> Any:
            return torch.relu(self.main(x) + self.side(x))

    blocks = (Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    model = GradSampleModule(nn.Sequential(conv(3, 16, 3), nn.ReLU(), *blocks, *tail))
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    how = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": UNITS}
    optimizer, (images, classes) = DPOptimizer(sgd, **how), _for_torch(UNITS, 32, 3, CLASSES)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()

    return step


def tf_privacy() -> Act:
    """W3: `vectorized_map` computes the gradients of 16 images at once; of 256, beyond 20 GB."""
    import tensorflow as tf
    from keras import Model, layers
    from tensorflow_privacy import VectorizedDPKerasSGDOptimizer

    def conv(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
        x = layers.Conv2D(filters, kernel, stride, "same", use_bias=False)(x)
        return layers.GroupNormalization(8)(x)

    x = layers.ReLU()(conv(inputs := layers.Input((32, 32, 3)), 16, 3))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        side = conv(x, filters, 1, stride) if stride > 1 else x
        x = conv(layers.ReLU()(conv(x, filters, 3, stride)), filters, 3)
        x = layers.ReLU()(x + side)
    model = Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))
    optimizer = VectorizedDPKerasSGDOptimizer(1.0, 1.0, 16, learning_rate=RATE)
    images, classes = map(tf.constant, _photos(16, 32, 3, CLASSES))

    @tf.function
    def some() -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, model(images))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)

    return lambda: [some() for _ in range(UNITS // 16)]


def jax_privacy() -> Act:
    """W3: `vmap` computes the gradient of each image of our network under Keras."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    from jax_privacy import clipped_grad

    from fedemb.config import ModelConfig
    from fedemb.models.backbones import build_backbone

    model, key = build_backbone(ModelConfig(**NET, classes=NAMES), 0), jax.random.key(0)
    images, classes = map(jax.numpy.asarray, _photos(UNITS, 32, 3, CLASSES))

    def loss(weights: Any, image: Any, label: Any) -> Any:
        logits, _ = model.stateless_call(weights, [], image)
        return -jax.nn.log_softmax(logits)[0, label[0]]

    gradient = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=UNITS, batch_argnums=(1, 2))

    @jax.jit
    def update(weights: Any) -> Any:
        def moved(weight: Any, mean: Any) -> Any:
            return weight - RATE * (mean + jax.random.normal(key, mean.shape) / UNITS)

        return jax.tree.map(moved, weights, list(gradient(weights, images, classes)))

    state = [variable.value for variable in model.trainable_variables]

    def step() -> None:
        state[:] = jax.block_until_ready(update(state))

    return step


def tff() -> Act:
    """W1: TensorFlow Federated, averages of clients with a fixed clip and noise."""
    import tensorflow as tf
    import tensorflow_federated as tff
    from keras import Sequential, layers, losses

    def conv(filters: int) -> list[Any]:
        return [layers.Conv2D(filters, 5, padding="same", activation="relu"), layers.MaxPool2D(2)]

    pairs = tf.data.Dataset.from_tensor_slices(_photos(EXAMPLES, 28, 1, ROWS))
    data = [pairs.repeat(EPOCHS).batch(BATCH).cache() for _ in range(CLIENTS)]

    def net() -> Any:
        tail = (layers.Flatten(), layers.Dense(128), layers.Dense(ROWS, use_bias=False))
        return tff.learning.models.from_keras_model(
            Sequential([layers.InputLayer((28, 28, 1)), *conv(32), *conv(64), *tail]),
            loss=losses.SparseCategoricalCrossentropy(from_logits=True),
            input_spec=data[0].element_spec,
        )

    private = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, CLIENTS, 1.0)
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        net, tff.learning.optimizers.build_sgdm(RATE), model_aggregator=private
    )
    state = [process.initialize()]

    def train() -> None:
        state[0] = process.next(state[0], data).state

    return train


def pfl() -> Act:
    """W1: pfl-research on PyTorch, averages of clients with clip and noise at the server."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
    from torch import nn

    def conv(inputs: int, filters: int) -> list[Any]:
        return [nn.Conv2d(inputs, filters, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]

    class Net(nn.Sequential):
        def loss(self, images: Any, classes: Any, **_: Any) -> Any:
            return nn.functional.cross_entropy(self(images), classes)

        def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {}

    tail = (nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.Linear(128, ROWS, bias=False))
    net, pairs = Net(*conv(1, 32), *conv(32, 64), *tail), _for_torch(EXAMPLES, 28, 1, ROWS)
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    data = FederatedDataset(lambda user: Dataset(pairs, user_id=str(user)), sampler)
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 1.0))
    backend = SimulatedBackend(data, data, postprocessors=[noise])
    sgd = torch.optim.SGD
    model = PyTorchModel(net, sgd, sgd(net.parameters(), lr=1.0))
    local = NNTrainHyperParams(
        local_batch_size=BATCH, local_num_epochs=EPOCHS, local_learning_rate=RATE
    )
    one = NNAlgorithmParams(1, evaluation_frequency=1, train_cohort_size=CLIENTS, val_cohort_size=0)
    return lambda: FederatedAveraging().run(one, backend, model, local)


PEERS = {
    "opacus": ("W3", "torch", opacus),
    "tf_privacy": ("W3", "tf", tf_privacy),
    "jax_privacy": ("W3", "", jax_privacy),
    "tff": ("W1", "tf", tff),
    "pfl": ("W1", "torch", pfl),
}
"""Name -> work; lock in `locks/`, empty for the environment of the project; what makes a round."""
