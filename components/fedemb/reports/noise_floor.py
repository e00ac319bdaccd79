"""The public noise floor: the minimum distance of a model from its public backbone, from the plan.

Released weights are a share of the public backbone plus the sum of w_r (S_r + N_r) over the rounds,
in units of clip / normalizer, where the w_r follow from the server's rule. N_r is noise of standard
deviation sigma in each of d coordinates, drawn after S_r is fixed; |S_r| is at most the number K of
clipped vectors. S_r may depend on all earlier noise, on the data and on the loss, but not on N_r.

Let L be the minimum length before a round. Before its noise, the sum has at least left = L - |w_r|
K. The square of its length after the noise is (|w_r| sigma)^2 times a noncentral chi-square with d
degrees of freedom and noncentrality at least (left / |w_r| sigma)^2. Birgé bounds its lower tail
(An alternative point of view on Lepski's method, 2001, lemma 8.1). Applied to each round in turn,
this is a bound for every data set and every loss. The bound is strong if the noise is longer than
the sums; otherwise it is the noise of the last rounds.

The server's rule is implemented here a second time, independently of the training code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedemb.documents.model_files import computes_otherwise

if TYPE_CHECKING:
    from pathlib import Path

    from fedemb.config import RunConfig, ServerConfig
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

FALSE_ALARM = 1e-9
"""Maximum probability that a correct run is below its floor."""
_DIGITS = 1e-3
"""Tolerance for weights and means, which are float32."""


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """Share of the start in a released model, and the weight of each round."""

    start_share: float
    """Weight of the public backbone; below 1 with weight decay."""
    round_weights: tuple[float, ...]
    """Weight of each round's mean."""
    unit: float
    """Clip / normalizer."""
    noise_multiplier: float
    """Standard deviation of the noise in one weight / unit."""
    contributions: float
    """Maximum clipped vectors in a round, except with the probability of a false alarm."""

    def length(self, coordinates: int) -> float:
        """Returns the minimum distance of trained weights from the start's share."""
        sure = _sure(len(self.round_weights))
        length = 0.0
        for weight in map(abs, self.round_weights):
            noise = weight * self.noise_multiplier
            if not noise:
                continue
            left = max(0.0, length - weight * self.contributions)
            share = (left / noise) ** 2
            square = coordinates + share - 2 * math.sqrt((coordinates + 2 * share) * sure)
            length = noise * math.sqrt(max(0.0, square))
        return (1 - _DIGITS) * self.unit * length


def why_no_floor(config: RunConfig, plan: MechanismPlan, start: Path | None = None) -> str | None:
    """Returns why no floor applies, or None. Without `start`, only the plan is checked."""
    if plan.tracks_participation:
        return "its rounds share noise"
    if plan.solves is not None:
        return f"the {plan.solves} is solved from the noised sum"
    if config.training.server.optimizer != "sgd":
        return f"{config.training.server.optimizer} is not linear in the noised means"
    if start is not None and computes_otherwise(start):
        return "its convolutions standardise their weights, and the model holds those"
    return None


def noise_floor(
    config: RunConfig, plan: MechanismPlan, start: Path | None = None
) -> NoiseFloor | None:
    """Returns the floor of a run; None if no floor applies, see `why_no_floor`."""
    if why_no_floor(config, plan, start) is not None:
        return None
    server = config.training.server
    share, means = _weights(server, plan.rounds)
    clip = 1.0 if server.rescale_to_unit_norm else plan.l2_norm_clip
    return NoiseFloor(
        start_share=share,
        round_weights=tuple(means.tolist()),
        unit=clip / plan.normalizer,
        noise_multiplier=plan.noise_multiplier,
        contributions=_contributions(plan),
    )


def _sure(rounds: int) -> float:
    """Returns the exponent for two tails per round that keeps `FALSE_ALARM` over all rounds."""
    return math.log(2 * rounds / FALSE_ALARM)


def _contributions(plan: MechanismPlan) -> float:
    """Returns the bound on clipped vectors in a round: the tail of the coins, or the maximum.

    The number of units is private, so if units are sampled, the only bound is the capacity of the
    sum.
    """
    if plan.samples_units:
        return float(plan.most_contributions)
    sure, expected = _sure(plan.rounds), plan.normalizer
    bernstein = expected + math.sqrt(2 * expected * sure) + sure / 3
    return min(float(plan.most_contributions), bernstein)


def _weights(server: ServerConfig, rounds: int) -> tuple[float, np.ndarray]:
    """Returns the released weights of the start and of each round's mean, `[rounds]`."""
    # The last entry represents the start, which is never a mean.
    weights, momentum, average = (np.zeros(rounds + 1) for _ in range(3))
    weights[-1] = 1.0
    for index in range(rounds):
        mean = np.zeros(rounds + 1)
        mean[index] = 1.0
        momentum = server.momentum * momentum + mean
        step = server.momentum * momentum + mean if server.nesterov else momentum
        step = step - server.weight_decay * weights
        weights = weights + _rate(server, index, rounds) * step
        average = server.ema_decay * average + (1 - server.ema_decay) * weights
    if server.ema_decay:
        weights = average / (1 - server.ema_decay**rounds)
    return float(weights[-1]), weights[:-1]


def _rate(server: ServerConfig, index: int, rounds: int) -> float:
    if index < server.warmup_rounds:
        return server.learning_rate * (index + 1) / server.warmup_rounds
    done = (index - server.warmup_rounds) / max(1, rounds - server.warmup_rounds)
    factors = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}
    return server.learning_rate * factors[server.schedule]
