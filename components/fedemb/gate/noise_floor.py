"""The public noise floor: how far a model must have moved from its public start, from plan alone.

Released weights are start plus the committed means, each with a weight that follows from the
server's rule. The noise in them has length s * sqrt(d), give or take six standard deviations, and
what trained comes on top of it: embeddings hardly lean against noise of earlier rounds, which is
experience and no proof. The server's rule is written again here, apart from the one that trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedemb.config import RunConfig, ServerConfig
from fedemb.documents.mechanism_audit import SIGMAS
from fedemb.privacy.mechanisms.mechanism import MechanismPlan


@dataclass(frozen=True)
class NoiseFloor:
    """What a released model keeps of its start, and how much noise is in each weight."""

    start_share: float
    """Weight of the public start; below 1 with weight decay."""
    deviation: float
    """Standard deviation of the noise in one weight."""

    def length(self, coordinates: int) -> float:
        """Least distance from the start's share, of weights that trained."""
        if coordinates < 2 * SIGMAS**2:
            return 0.0
        sure = 1 - SIGMAS / math.sqrt(2 * coordinates)
        return self.deviation * math.sqrt(coordinates) * sure


def noise_floor(config: RunConfig, plan: MechanismPlan, coordinates: int) -> NoiseFloor | None:
    """The floor of a run; None where none can be told from the plan.

    That is so where the rule is not linear in the means, the clip moves, rounds share noise, a
    round's noise is no longer than its clipped mean can be, or a classifier is trained: its loss
    pulls weights back that noise has moved (docs/privacy/audit.md#evidence-of-the-run).
    """
    server = config.training.server
    told = server.optimizer == "sgd" and plan.adaptive_clip is None
    if not told or plan.tracks_participation or config.task == "classification":
        return None
    if plan.noise_multiplier * math.sqrt(coordinates) < plan.normaliser:
        return None
    start, means = _weights(server, plan.rounds)
    clip = 1.0 if server.rescale_to_unit_norm else plan.l2_norm_clip
    one_round = plan.noise_multiplier * clip / plan.normaliser
    return NoiseFloor(start, one_round * float(np.linalg.norm(means)))


def _weights(server: ServerConfig, rounds: int) -> tuple[float, np.ndarray]:
    """Weights of the start and of each round's mean, `[rounds]`, in what is released."""
    # The last entry stands for the start, which no mean ever is.
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
