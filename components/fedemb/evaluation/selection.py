"""Scores the trials of a private search on one half of the held-out users.

Held-out users never train, so the score follows from the noised model alone, and a trial with its
score costs what its training costs. The other half of the held-out users is measured for the
report: its figures do not depend on the choice. Held-out users are not covered by the guarantee.
"""

from __future__ import annotations

from fedemb.config import RunConfig
from fedemb.data.client_data import UserStore
from fedemb.errors import Diverged, InputError
from fedemb.evaluation.classification import top_1
from fedemb.evaluation.held_out import Subjects, apply_models
from fedemb.evaluation.metrics import arrange, verify
from fedemb.models.arrays import Model
from fedemb.models.inference import classify, embed

_SAMPLES = 2
"""Bootstrap draws, of which none is used."""


def score(store: UserStore, config: RunConfig, model: Model) -> float | None:
    """Returns the score of a trained model; higher is better.

    Returns: Top-1 accuracy of a classifier, or recall at the first false accept rate, in 0..1. None
      if an output of the model is not finite.

    Raises:
      InputError: the scoring half of the held-out users cannot be measured.
    """
    classifies = config.task == "classification"
    subjects, outputs = apply_models(
        store, {"model": model}, config, classify if classifies else embed, scoring=True
    )
    _require(subjects, config)
    try:
        if classifies:
            found = top_1(outputs["model"], subjects)
        else:
            data = arrange(outputs["model"], subjects.labels, subjects.clusters)
            rates = config.evaluation.false_accept_rates[:1]
            found = verify(data, rates, samples=_SAMPLES).recall[0].value
    except Diverged:
        return None
    return float(found) if 0 <= found <= 1 else None


def require_measurable(store: UserStore, config: RunConfig, backbone: Model) -> None:
    """Checks that the scoring half of the held-out users can be measured, before the first trial.

    Raises:
      InputError: it cannot.
    """
    score(store, config, backbone)


def _require(subjects: Subjects, config: RunConfig) -> None:
    enough = len(subjects.labels) if config.task == "classification" else subjects.measurable
    if not enough:
        raise InputError(
            "the half of the held-out users that scores the trials has too few images. Raise "
            "partition.evaluation.fraction"
        )
