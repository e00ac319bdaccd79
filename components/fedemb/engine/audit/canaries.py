"""Canaries in a separate mechanism, which is built from the plan like the real one.

Sampler, clip, grid, sum and noise are the same code with a separate key, so the output shows noise,
clip and sampling probability as executed. Canaries do not train the model: their vectors use
coordinates that no model has, and no real user's record, coin or noise depends on them. Published
canary figures are a function of only keys and plan, at no privacy cost.
"""

# TensorFlow and jax-privacy ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from fedemb.documents.mechanism_audit import SIGMAS, CanaryFigures, LowerBounds
from fedemb.keys import derive
from fedemb.models.keras_backend import exact_numbers, keras_ops, traced

if TYPE_CHECKING:
    from fedemb.models.arrays import Tensor
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan
    from fedemb.privacy.randomness.sampling import VirtualClient

COORDINATES = 4096
CANARIES = 256
"""Number of included canaries; the same number is excluded and never added."""
ROUNDS = 32
"""Minimum number of rounds with canaries, spread evenly."""
_LENGTH = 10.0
"""Norm of a canary's record before the clip, in clips."""
_OWN = COORDINATES // (2 * CANARIES)


class CanaryIndex:
    """Canaries as users: canary i is in virtual client i mod G of every grouping.

    If images are sampled independently, each canary is an image.
    """

    def __init__(self, plan: MechanismPlan):
        self.virtual_clients, self.groupings = plan.virtual_clients, plan.groupings
        self._each = plan.user_contributions
        self.user_count = -(-CANARIES // self._each)
        numbers = np.arange(self.user_count, dtype=np.uint64)
        self.user_keys = numbers * np.uint64(0x9E3779B97F4A7C15)

    def members(self, grouping: int, group: int) -> np.ndarray:
        """Returns the canaries of a virtual client."""
        del grouping
        return np.arange(group, CANARIES, self.virtual_clients)

    def canaries(self, client: VirtualClient) -> np.ndarray:
        """Returns the numbers of the canaries in a virtual client."""
        if self._each == 1:
            return client.users
        images = client.users * self._each + client.grouping
        return images[images < CANARIES]


class _Counts(TypedDict):
    rounds: int
    contributions: int
    taken: int


class _Sums(TypedDict):
    energy: float
    length: float
    between: float


class CanaryState(_Counts, _Sums):
    """Saved state of the canaries."""

    scores: list[float]
    before: list[float]


class CanaryMechanism:
    """The canaries of one attempt.

    Args:
      plan: of the attempt, whose rounds do not share noise.
      root_key: of the attempt; canaries take a separate subkey.
      run_id: the run.
      attempt: the attempt.
      inputs_sha: of everything that goes in.
    """

    def __init__(
        self, plan: MechanismPlan, root_key: bytes, run_id: str, attempt: int, inputs_sha: str
    ):
        from fedemb.privacy.queries import build_mechanism

        ops = keras_ops()
        # One virtual client per canary if virtual clients are sampled.
        self.plan = plan.replaced(virtual_clients=max(CANARIES, plan.virtual_clients))
        key = derive(root_key, "canaries")
        self._mechanism = build_mechanism(self.plan, key, run_id, attempt, inputs_sha)
        self._index = CanaryIndex(self.plan)
        random = np.random.default_rng(list(derive(key, "membership")))
        # The included canaries are secret until the run ends, so no code can single them out.
        self._included = random.permutation(2 * CANARIES)[:CANARIES]
        self._counts = _Counts(rounds=0, contributions=0, taken=0)
        self._sums = _Sums(energy=0.0, length=0.0, between=0.0)
        self._before = np.zeros(COORDINATES)
        self._scores = np.zeros(2 * CANARIES)
        mechanism, parameters = self._mechanism, self._mechanism.sample_params()

        def summed(records: Tensor) -> tuple[Tensor]:
            clipped = ops.vectorized_map(lambda r: mechanism.record(parameters, [r])[0], records)
            return (ops.sum(clipped, axis=0),)

        self._summed = traced(summed)

    def add(self, round_index: int) -> None:
        """Adds the canaries to a round, if it is a canary round."""
        if round_index % max(1, self.plan.rounds // ROUNDS):
            return
        clients = self._mechanism.sample_clients(round_index, self._index)
        taken = [found for client in clients if len(found := self._index.canaries(client))]
        # A fixed number of rows, so that it is compiled once; rows of zeros add nothing.
        directions = np.zeros((CANARIES, 2 * CANARIES, _OWN), np.float32)
        for row, canaries in enumerate(taken):
            directions[row, self._included[canaries]] = 1.0
        directions = directions.reshape(CANARIES, COORDINATES)
        directions /= np.maximum(1, np.linalg.norm(directions, axis=1, keepdims=True))
        clip = self.plan.l2_norm_clip
        with exact_numbers():
            state = self._summed(directions * np.float32(_LENGTH * clip))
        output = self._mechanism.aggregate(round_index, state).mean.astype(np.float64)
        output *= self.plan.normalizer / clip
        along = directions.astype(np.float64) @ output
        self._counts["rounds"] += 1
        self._counts["contributions"] += len(taken)
        self._counts["taken"] += sum(map(len, taken))
        self._sums["length"] += float(along.sum())
        self._sums["energy"] += float(output @ output - along @ along)
        rest = output - along @ directions
        self._sums["between"] += float(rest @ self._before)
        self._before = rest
        self._scores += output.reshape(2 * CANARIES, _OWN).sum(axis=1)

    @property
    def rounds_differ(self) -> bool:
        """Whether pure noise coordinates of successive rounds are uncorrelated.

        Given the previous round, the product is normal with standard deviation sigma |rest|.
        """
        pairs = max(0, self._counts["rounds"] - 1) * COORDINATES
        most = SIGMAS * self.plan.noise_multiplier**2 * math.sqrt(pairs)
        return abs(self._sums["between"]) <= most

    @property
    def found(self) -> CanaryFigures:
        """Returns the canary results so far."""
        counts, sums = self._counts, self._sums
        chance = self.plan.chance
        free = counts["rounds"] * COORDINATES - counts["contributions"]
        taken = counts["taken"] / max(1, counts["rounds"] * CANARIES)
        return CanaryFigures(
            rounds=counts["rounds"],
            coordinates=COORDINATES,
            canaries=CANARIES,
            contributions=counts["contributions"],
            noise_multiplier=math.sqrt(sums["energy"] / max(1, free)),
            contribution=sums["length"] / max(1, counts["contributions"]),
            sampling_probability=None if chance is None else taken,
        )

    def lower_bounds(self, delta: float) -> LowerBounds:
        """Returns lower bounds on epsilon from the canaries' scores, at 95 % confidence.

        Args:
          delta: delta of the guarantee.
        """
        from jax_privacy.auditing import CanaryScoreAuditor

        left_out = np.ones(2 * CANARIES, bool)
        left_out[self._included] = False
        auditor = CanaryScoreAuditor(self._scores[self._included], self._scores[left_out])
        return LowerBounds(
            included=CANARIES,
            left_out=CANARIES,
            one_run=float(auditor.epsilon_one_run(0.05, delta)),
            f_dp=float(auditor.epsilon_one_run_fdp(0.05, delta)),
        )

    def to_json(self) -> CanaryState:
        """Returns the state as JSON."""
        scores, before = self._scores.tolist(), self._before.tolist()
        return {**self._counts, **self._sums, "scores": scores, "before": before}

    def restore(self, figures: CanaryState) -> None:
        """Resumes after the rounds that `to_json` covered."""
        self._scores = np.array(figures["scores"])
        self._before = np.broadcast_to(np.array(figures["before"]), COORDINATES)
        self._counts = _Counts(
            rounds=figures["rounds"],
            contributions=figures["contributions"],
            taken=figures["taken"],
        )
        self._sums = _Sums(
            energy=figures["energy"], length=figures["length"], between=figures["between"]
        )
