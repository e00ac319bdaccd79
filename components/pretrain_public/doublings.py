"""Trains a public start for as long as that helps classes which it has not seen."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from fedemb.config import PretrainingConfig
from fedemb.documents.model import PublicTraining
from fedemb.embedding import embed, pretrain
from fedemb.errors import InputError
from fedemb.evaluation.metrics import recall

_LOG = logging.getLogger(__name__)

FALSE_ACCEPT_RATE = 0.01
HELD_OUT = 0.1
"""Share of the public classes that measure and never train."""
MOST_IMAGES = 2000
"""Images that measure, at most: all their pairs are compared."""


def train_while_it_helps(
    backbone: Any,
    images: UInt8[np.ndarray, "images size size channels"],
    labels: Int[np.ndarray, " images"],
    config: PretrainingConfig,
    *,
    seed: int,
) -> tuple[float, list[PublicTraining]]:
    """Trains with `epochs`, twice as many and so on, from the same weights; keeps the best.

    Each is a whole schedule down to a learning rate of zero: a training cut short in the middle of
    its schedule would say little of one that ends there.

    Args:
      backbone: start; holds the best weights afterwards.
      images: public.
      labels: their classes.
      config: `epochs` of the first training, `doublings` at most after it.
      seed: of the classes held out, and of each training.

    Returns:
      Mean loss of the last epoch of the training that was kept, and all trainings in order.

    Raises:
      InputError: the classes held out cannot measure a recall.
    """
    classes = np.unique(labels)
    chosen = np.random.default_rng(seed).permutation(classes)[
        : max(2, round(HELD_OUT * len(classes)))
    ]
    held_out = np.isin(labels, chosen)
    _check(len(classes) - len(chosen), labels[held_out])
    start, best, loss = backbone.get_weights(), backbone.get_weights(), float("nan")
    tried: list[PublicTraining] = []
    for doubling in range(config.doublings + 1):
        backbone.set_weights(start)
        schedule = config.model_copy(update={"epochs": config.epochs * 2**doubling})
        found = pretrain(backbone, images[~held_out], labels[~held_out], schedule, seed=seed)
        value = _recall(backbone, images[held_out][:MOST_IMAGES], labels[held_out][:MOST_IMAGES])
        _LOG.info(
            "%d epochs: recall %.3f on %d public classes that did not train",
            schedule.epochs,
            value,
            len(chosen),
        )
        helped = value > max((one.recall for one in tried), default=-1.0)
        tried.append(PublicTraining(epochs=schedule.epochs, recall=value))
        if not helped:
            break
        best, loss = backbone.get_weights(), found
    backbone.set_weights(best)
    return loss, tried


def _check(training: int, held_out: np.ndarray) -> None:
    sizes = np.unique(held_out, return_counts=True)[1]
    if training < 2 or sizes.max(initial=0) < 2:
        raise InputError(
            f"pretraining.doublings holds out {len(sizes)} public classes of at most "
            f"{sizes.max(initial=0)} images and leaves {training}, wanted two that train and one "
            "of two images held out; name more public images, or set pretraining.doublings: 0"
        )


def _recall(backbone: Any, images: np.ndarray, labels: np.ndarray) -> float:
    return recall(embed(backbone, images), labels, FALSE_ACCEPT_RATE, samples=1).value
