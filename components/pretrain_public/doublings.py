"""Trains a public backbone for as long as longer training helps unseen classes."""

from __future__ import annotations

import logging

import numpy as np
from jaxtyping import Int, UInt8

from fedemb.config import PretrainingConfig
from fedemb.documents.model import PublicTraining
from fedemb.engine import embed, pretrain
from fedemb.errors import InputError
from fedemb.evaluation.metrics import recall
from fedemb.models.arrays import Model

_LOG = logging.getLogger(__name__)

FALSE_ACCEPT_RATE = 0.01
HELD_OUT = 0.1
"""Share of the public classes held out for measurement."""
MOST_IMAGES = 2000
"""Maximum number of measured images, because all their pairs are compared."""


def train_while_it_helps(
    backbone: Model,
    images: UInt8[np.ndarray, "images size size channels"],
    labels: Int[np.ndarray, " images"],
    config: PretrainingConfig,
    *,
    seed: int,
) -> tuple[float, list[PublicTraining]]:
    """Trains with `epochs`, then twice as many and so on; the backbone keeps the best weights.

    Each training is a whole schedule down to a learning rate of zero, because a schedule stopped in
    the middle does not predict the result of a complete one.

    Returns:
      Mean loss of the last epoch of the best training, not finite if the first training failed, and
      all completed trainings, in order.

    Raises:
      InputError: the held-out classes are too few to measure a recall.
    """
    classes = np.unique(labels)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(classes)[: max(2, round(HELD_OUT * len(classes)))]
    trains = ~np.isin(labels, chosen)
    # Drawn at random, because images are sorted by class.
    measures = rng.permutation(np.flatnonzero(~trains))[:MOST_IMAGES]
    _check(len(classes) - len(chosen), labels[measures])
    start, best, loss = backbone.get_weights(), backbone.get_weights(), float("nan")
    tried: list[PublicTraining] = []
    for doubling in range(config.doublings + 1):
        backbone.set_weights(start)
        schedule = config.model_copy(update={"epochs": config.epochs * 2**doubling})
        found = pretrain(backbone, images[trains], labels[trains], schedule, seed=seed)
        if not np.isfinite(found):
            break
        embedded = embed(backbone, images[measures])
        value = recall(embedded, labels[measures], FALSE_ACCEPT_RATE, samples=1).value
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
    if training < 2 or len(sizes) < 2 or sizes.max() < 2:
        raise InputError(
            "pretraining.doublings needs two public classes that train and two held out, one "
            f"of them with two images. Got {len(sizes)} held out with at most "
            f"{sizes.max(initial=0)} images and {training} that train. Add public images, or "
            "set pretraining.doublings: 0."
        )
