"""Virtual clients and units, and ways to train them, for tests in processes of either backend."""

import numpy as np

from fedemb.config import (
    AugmentationConfig,
    LocalTrainingConfig,
    LossConfig,
    ModelConfig,
    UnitGradientConfig,
)
from fedemb.training.rounds import ClientExamples

MODEL = ModelConfig(backbone="tanh_cnn", image_size=12, embedding_dim=8)
SEED, ROUND = 9, 3
LOCAL = LocalTrainingConfig(
    epochs=2,
    batch_size=4,
    max_examples_per_client=16,
    client_learning_rate=0.005,
    head_learning_rate_scale=4,
)
VARIANTS = {
    "joint": {},
    "prototypes": {"head_init": "prototypes", "client_momentum": 0.0},
    "refreshed": {"head_init": "prototypes", "refresh_prototypes": True},
    "augmented": {"augmentation": AugmentationConfig(), "loss": LossConfig(kind="cosface")},
    "shared": {"loss": LossConfig(kind="softmax")},
}
"""Changes of `LOCAL` whose records both backends make; `shared` is DP-FedAvg with three rows."""
QUICK = ("joint", "shared")
"""The others are compared at night: each is a program that JAX compiles for ten seconds."""


def clients():
    """Seven of different sizes, one beyond the cap; each has up to three classes."""
    random = np.random.default_rng(0)
    return [
        ClientExamples(
            0,
            group,
            random.integers(0, 256, (count, 12, 12, 1), np.uint8),
            random.integers(0, 3, count),
        )
        for group, count in enumerate((1, 3, 7, 16, 4, 9, 19))
    ]


UNIT_MODEL = ModelConfig(
    backbone="resnet8",
    image_size=8,
    channels=3,
    embedding_dim=16,
    classes=tuple("abc"),
    head_init="glorot",
)
CONFIG = UnitGradientConfig(images_per_unit=2, microbatch=4, views=2, flip=True, crop_padding=2)


def units():
    """Nine of one or two images."""
    random, made = np.random.default_rng(0), []
    for unit in range(9):
        images = random.integers(0, 256, (1 + unit % 2, 8, 8, 3), np.uint8)
        made.append(ClientExamples(0, unit, images, random.integers(0, 3, len(images))))
    return made
