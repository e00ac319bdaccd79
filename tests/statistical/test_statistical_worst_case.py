"""Monte Carlo on worst-case data: the accountant's delta is attained, and not passed.

The pair is that of docs/privacy/theorem.md#statement.

One dimension; all other users push nothing, the target flips its virtual client from -C to +C. The
likelihood-ratio test between the two worlds is the best attack there is, so its advantage at
epsilon is a lower bound on delta that converges to the true one.
"""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from scipy.stats import norm

from fedemb.privacy.losses import pld_of
from fedemb.privacy.noise import coins, gaussian
from fedemb.privacy.sampling import sample
from tests.kit.privacy_worlds import ROOT, World, make_plan

pytestmark = pytest.mark.statistical

Q, SIGMA, ROUNDS, RUNS, EPSILON = 0.05, 1.0, 20, 400_000, 1.0


def losses(noise: np.ndarray, sampled: np.ndarray, shift: float) -> np.ndarray:
    """Privacy loss of each run, log P(out) - log Q(out), when the target's update is `shift`."""
    out = noise + sampled * shift
    up = (1 - Q) * norm.pdf(out) + Q * norm.pdf(out, 1 / SIGMA)
    down = (1 - Q) * norm.pdf(out) + Q * norm.pdf(out, -1 / SIGMA)
    return np.log(up / down).sum(axis=1)


@pytest.fixture(scope="module")
def outcomes():
    noise = gaussian(ROOT, RUNS * ROUNDS).reshape(RUNS, ROUNDS)
    words = coins(ROOT, RUNS * ROUNDS).reshape(RUNS, ROUNDS)
    return noise, words < np.uint64(int(Q * 2**64))


@pytest.mark.long
def test_attack_attains_the_accountants_delta_and_not_more(outcomes):
    """Estimate within 5 standard errors of the accountant's value (6e-7), which is 5.55e-3."""
    plan = make_plan(rounds=ROUNDS, sampling_probability=Q, noise_multiplier=SIGMA)
    claimed = pld_of(plan.event(), plan.relation).get_delta(EPSILON)
    assert claimed == pytest.approx(5.55e-3, rel=0.02)
    # delta = E_P[(1 - e^(epsilon - loss))+]
    gain = np.maximum(0, -np.expm1(EPSILON - losses(*outcomes, 1 / SIGMA)))
    error = gain.std() / math.sqrt(RUNS)
    assert gain.mean() <= claimed + 5 * error
    assert gain.mean() >= claimed - 5 * error - 0.02 * claimed


@pytest.mark.long
def test_naive_accounting_is_refuted_by_the_same_attack(outcomes):
    """The claim at sensitivity C under ADD_OR_REMOVE is five times too small."""
    plan = make_plan(rounds=ROUNDS, sampling_probability=Q, noise_multiplier=SIGMA)
    naive = pld_of(plan.event(), Relation.ADD_OR_REMOVE_ONE).get_delta(EPSILON)
    gain = np.maximum(0, -np.expm1(EPSILON - losses(*outcomes, 1 / SIGMA)))
    assert gain.mean() - 5 * gain.std() / math.sqrt(RUNS) > 3 * naive


def test_the_real_sampler_gives_the_target_this_chance():
    """The target's virtual client takes part in Binomial(rounds, q) rounds; 5 sigma."""
    plan = make_plan(rounds=4000, sampling_probability=Q)
    world = World(range(30), 40)
    target = world.group_of(7, 0)
    hits = sum(
        any(client.group == target for client in sample(plan, ROOT, r, world)) for r in range(4000)
    )
    assert abs(hits - 4000 * Q) < 5 * math.sqrt(4000 * Q * (1 - Q))
