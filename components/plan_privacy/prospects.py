"""Compares the noise of a plan with the noise at which measured runs gained.

Utility depends on the noise, not on epsilon: a small population with the usual epsilon has noise
that no model can learn through. `REGIONS` holds the measured limits. They are evidence from other
images, so they separate plans that can help from plans that cannot; they predict no figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedemb.config import RunConfig
from fedemb.errors import Refused
from fedemb.privacy.accounting.units import UNITS
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.reports.noise_floor import noise_floor

Recipe = Literal["whole_net", "projection", "whitening", "head", "all_layers"]


@dataclass(frozen=True)
class Region:
    """Measured limits of the noise for one kind of training."""

    helpful: float
    """Maximum noise at which a gain over the public backbone was significant."""
    hopeless: float
    """Twice the maximum noise at which any measured run gained."""
    evidence: str
    """Source of the figures."""


REGIONS: Mapping[Recipe, Region] = {
    "whole_net": Region(
        0.001, 0.06, "LeNet on Omniglot: +.069 at 0.001, +.048 at 0.01, +.026 at 0.03"
    ),
    "projection": Region(
        0.03,
        0.2,
        "projection of EfficientNet-Lite2 on car photos: +.059 at 0.03; Lite0: +.014 at 0.1",
    ),
    "whitening": Region(
        0.003,
        0.02,
        "covariances of EfficientNet-Lite2 features on car photos: +.05 at 0.003, +.03 at 0.01",
    ),
    "head": Region(
        0.1, 1.2, "head on scattering features, sign digits: 90 % at 0.09, 54 % at 0.58"
    ),
    "all_layers": Region(0.06, 0.3, "CIFAR-10, all layers: 70 % at 0.06, published 57 % at 0.14"),
}
"""Limits by kind of training. Noise of embeddings: noise on the mean of one round / clipping norm.
Noise of classifiers: length of the noise on the mean gradient of the whole training / clipping
norm, in all trained weights."""

WEIGHTS: Mapping[str, float] = {
    "lenet": 3.2e5,
    "mobilenet_small": 1.2e5,
    "mobilenetv2": 2.3e6,
    "nf_resnet50": 2.4e7,
    "resnet14": 1.8e5,
    "resnet14_ws": 1.8e5,
    "resnet18_gn": 1.1e7,
    "resnet50": 2.4e7,
    "resnet50_ws": 2.4e7,
    "resnet8": 8.2e4,
    "resnet8_s2": 1.6e5,
    "resnet8_wide": 1.9e6,
    "resnet8_ws": 8.2e4,
    "scatter_cnn": 2.4e5,
    "tanh_cnn": 4.2e5,
    "tiny": 3.5e4,
    "wrn_16_4": 2.8e6,
    "wrn_40_4": 9.0e6,
}
"""Trainable weights of a backbone for 32 pixels, two digits. The square root enters the noise, so
other sizes of image change the comparison little."""


@dataclass(frozen=True)
class Prospects:
    """Noise of a plan and the region of the measurements that it is in."""

    recipe: Recipe
    noise: float
    """In the unit of `REGIONS`."""

    @property
    def limits(self) -> Region:
        """Measured limits of this kind of training."""
        return REGIONS[self.recipe]

    @property
    def measure(self) -> str:
        """Description of the noise, after "the noise"."""
        embedding = self.recipe in ("whole_net", "projection", "whitening")
        return "on the mean of a round" if embedding else "in all weights and rounds together"

    @property
    def region(self) -> Literal["helpful", "uncertain", "hopeless"]:
        """Position of the noise between the limits."""
        if self.noise <= self.limits.helpful:
            return "helpful"
        return "uncertain" if self.noise <= self.limits.hopeless else "hopeless"


def prospects(config: RunConfig, plan: MechanismPlan) -> Prospects | None:
    """Returns the prospects of a plan; None if no measurement applies to this kind of training."""
    if not plan.private:
        return None
    if config.task == "embedding":
        if plan.solves == "projection":
            return Prospects("whitening", noise_on_mean(plan))
        if config.mechanism.samples_units:
            return None
        recipe: Recipe = "projection" if config.model.trainable == "projection" else "whole_net"
        return Prospects(recipe, noise_on_mean(plan))
    weights = trained_weights(config)
    if plan.solves is not None or weights is None:
        return None
    noise = noise_on_mean(plan) * math.sqrt(weights / plan.rounds)
    return Prospects("head" if config.model.trainable == "head" else "all_layers", noise)


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
    floor = noise_floor(config, plan)
    if floor is None:
        return None
    deviation = floor.unit * floor.noise_multiplier * math.hypot(*floor.round_weights)
    return math.sqrt(1 + math.pi * deviation**2 / 8)


def users_needed(config: RunConfig, found: Prospects) -> int:
    """Returns the number of users at which the same plan would reach the helpful region."""
    return math.ceil(config.policy.users_lower_bound * found.noise / found.limits.helpful)


def check_prospects(config: RunConfig) -> None:
    """Refuses a release that cannot help its users, before anything is charged.

    `release.train_despite_noise` overrides the refusal; the privacy report repeats it.

    Raises:
      Refused: the noise is far above the noise of every measured run that gained.
    """
    if config.purpose != "release" or config.release.train_despite_noise:
        return
    found = prospects(config, plan_mechanism(config))
    if found is None or found.region != "hopeless":
        return
    raise Refused(
        f"the noise is {found.noise:.2g} clipping norms, and no measured run gained above "
        f"{found.limits.hopeless / 2:g} ({found.limits.evidence}). Nothing was charged. "
        f"{remedy(config, found)} To train anyway, set release.train_despite_noise to the reason; "
        "the privacy report repeats it."
    )


def remedy(config: RunConfig, found: Prospects) -> str:
    """Returns changes that move a plan with too much noise into the helpful region."""
    units = UNITS[config.policy.unit].many
    sampled = getattr(config.mechanism, "sampling_probability", 1.0) < 1
    count = users_needed(config, found)
    rounded = round(count, 2 - len(str(count)))
    needed = f"About {rounded:,} {units} would be needed for a clear gain."
    ways = {
        "whole_net": "Train a projection on a strong public backbone (fedemb backbone list), or use"
        " fewer rounds or a larger epsilon.",
        "projection": f"Use {'every virtual client in every round, ' if sampled else ''}"
        "fewer rounds or a larger epsilon.",
        "whitening": "Use fewer model.principal_directions or a larger epsilon.",
        "head": "Use fewer classes or features, or a larger epsilon.",
        "all_layers": "Train only the head (model.trainable: head), on features of a strong public "
        "backbone or of backbone scatter_linear, or use a larger epsilon.",
    }
    return f"{needed} {ways[found.recipe]}"
