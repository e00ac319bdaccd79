"""Refuses a release whose noise is far above the noise of every measured run that gained.

Utility depends on the noise, not on epsilon: a small population with the usual epsilon has noise
that no model can learn through. The limits are evidence from other images. They predict no gain: a
simulation measures it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from fedemb.config import RunConfig
from fedemb.errors import Refused
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_mechanism

Recipe = Literal["whole_net", "projection", "whitening", "head", "all_layers"]
LARGEST_THAT_GAINED: Mapping[Recipe, tuple[float, str]] = {
    "whole_net": (0.03, "LeNet on Omniglot: +.026 at 0.03"),
    "projection": (0.1, "projection of EfficientNet-Lite0 on car photos: +.014 at 0.1"),
    "whitening": (0.01, "covariances of EfficientNet-Lite2 features on car photos: +.03 at 0.01"),
    "head": (0.6, "head on scattering features, sign digits: 54 % at 0.58"),
    "all_layers": (0.15, "CIFAR-10, all layers: published 57 % at 0.14"),
}
"""Largest noise at which a measured run gained, and where it was measured.

Noise of embeddings: noise on the mean of one round / clipping norm. Noise of classifiers: length of
the noise on the mean gradient of the whole training / clipping norm, in all trained weights."""
REFUSED_FROM = 2.0
"""Multiple of `LARGEST_THAT_GAINED` from which a release is refused."""

WEIGHTS: Mapping[str, float] = {
    "lenet": 3.2e5,
    "mobilenetv2": 2.3e6,
    "resnet8": 8.2e4,
    "resnet8_s2": 1.6e5,
    "resnet8_ws": 8.2e4,
    "tanh_cnn": 4.2e5,
    "tiny": 3.5e4,
    "wrn_16_4": 2.8e6,
}
"""Trainable weights of a backbone for 32 pixels, two digits. The square root enters the noise, so
other sizes of image change the comparison little."""


def training_noise(config: RunConfig, plan: MechanismPlan) -> tuple[Recipe, float] | None:
    """Returns the kind of training and its noise in the unit of `LARGEST_THAT_GAINED`.

    None if the plan is not private, or nothing was measured for this kind of training.
    """
    if not plan.private:
        return None
    if config.task == "embedding":
        if plan.solves == "projection":
            return "whitening", noise_on_mean(plan)
        if config.mechanism.samples_units:
            return None
        recipe: Recipe = "projection" if config.model.trainable == "projection" else "whole_net"
        return recipe, noise_on_mean(plan)
    weights = trained_weights(config)
    if plan.solves is not None or weights is None:
        return None
    noise = noise_on_mean(plan) * math.sqrt(weights / plan.rounds)
    return "head" if config.model.trainable == "head" else "all_layers", noise


def noise_on_mean(plan: MechanismPlan) -> float:
    """Returns the standard deviation of noise on the mean update / clip; it limits utility."""
    return plan.noise_multiplier / plan.normalizer


def trained_weights(config: RunConfig) -> float | None:
    """Returns the approximate number of trained weights; None if only the built model shows it."""
    model = config.model
    head = (model.embedding_dim + 1) * max(1, len(model.classes))
    if model.trainable == "head":
        return head
    if model.trainable != "all" or model.backbone not in WEIGHTS:
        return None
    return WEIGHTS[model.backbone] + head


def temperature_for_noise(config: RunConfig, plan: MechanismPlan) -> float | None:
    """Returns the divisor of a head's logits that corrects their probabilities for the noise.

    The noise of the released head has a known standard deviation, and so has its share in a logit,
    because features have length 1. A logit with Gaussian noise of standard deviation s has about
    the expected probability of the logit without noise / sqrt(1 + pi s^2 / 8) (MacKay 1992, The
    evidence framework applied to classification networks), if that logit is as large as the noise
    or larger. No data are used.

    Returns:
      At least 1; None if more than a head is trained, or the noise in the weights is not known.
    """
    if config.task != "classification" or config.model.trainable != "head":
        return None
    from fedemb.engine.server import mean_shares

    server = config.training.server
    if plan.tracks_participation or plan.solves is not None:
        return None
    clip = 1.0 if server.rescale_to_unit_norm else plan.l2_norm_clip
    deviation = clip * noise_on_mean(plan) * math.hypot(*mean_shares(server, plan.rounds))
    return math.sqrt(1 + math.pi * deviation**2 / 8)


def check_noise(config: RunConfig) -> None:
    """Refuses a release that cannot help its users, before anything is charged.

    `release.train_despite_noise` overrides the refusal; the privacy report repeats it.

    Raises:
      Refused: the noise is far above the noise of every measured run that gained.
    """
    if config.purpose != "release" or config.release.train_despite_noise:
        return
    found = training_noise(config, plan_mechanism(config))
    if found is None:
        return
    recipe, noise = found
    largest, evidence = LARGEST_THAT_GAINED[recipe]
    if noise <= REFUSED_FROM * largest:
        return
    raise Refused(
        f"the noise is {noise:.2g} clipping norms, and no measured run gained above "
        f"{largest:g} ({evidence}). Nothing was charged. {_REMEDIES[recipe]} To train anyway, set "
        "release.train_despite_noise to the reason; the privacy report repeats it."
    )


_REMEDIES: Mapping[Recipe, str] = {
    "whole_net": "Train a projection on a strong public backbone (fedemb backbone show), or use "
    "fewer rounds or a larger epsilon.",
    "projection": "Use every virtual client in every round, fewer rounds or a larger epsilon.",
    "whitening": "Use fewer model.principal_directions or a larger epsilon.",
    "head": "Use fewer classes or features, or a larger epsilon.",
    "all_layers": "Train only the head (model.trainable: head), on features of a strong public "
    "backbone or of backbone scatter_linear, or use a larger epsilon.",
}
