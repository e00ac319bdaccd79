"""Noise and coins are what the accountant assumes. False-alarm rates are those of fixed seeds: the
keys are constants, so a green test stays green; each line states the rate over random keys.
"""

import hashlib
import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from scipy.stats import binom, chi2, chisquare, kstest, kurtosis, norm, poisson

from fedemb.privacy import noise
from fedemb.privacy.losses import pld_of
from fedemb.privacy.noise import coins, gaussian
from fedemb.privacy.sampling import sample
from tests.kit.privacy_worlds import ROOT, World, make_plan
from tests.kit.process import python

pytestmark = pytest.mark.statistical

SIZE = 1_000_000


@pytest.mark.parametrize("scale", [0.3, 1.0, 7.0])
def test_noise_is_normal_with_the_configured_scale(scale):
    """Kolmogorov-Smirnov at 1 %; 2/3 and 3/2 of the scale are rejected at 1e-6 or better."""
    grid = 2.0**32
    z = noise.add_rounded_noise(np.zeros(SIZE, np.int64), ROOT, scale * grid) / grid
    sample = z[:100_000]
    assert kstest(sample / scale, "norm").pvalue > 0.01
    for wrong in (2 / 3, 3 / 2):
        assert kstest(sample / (wrong * scale), "norm").pvalue < 1e-6
    # Standard deviation within 6 standard errors (2e-9), mean within 5 (6e-7), kurtosis within 6.
    assert abs(z.std() / scale - 1) < 6 / math.sqrt(2 * SIZE)
    assert abs(z.mean() / scale) < 5 / math.sqrt(SIZE)
    assert abs(kurtosis(z)) < 6 * math.sqrt(24 / SIZE)


def test_tail_frequencies_of_the_normals_are_correct():
    """Counts beyond 3, 4 and 4.5 of 4 M normals, each within 6 standard deviations of a Poisson."""
    z = np.abs(noise.gaussian(ROOT, 4_000_000))
    for bound in (3.0, 4.0, 4.5):
        expected = 4e6 * math.erfc(bound / math.sqrt(2))
        assert abs((z > bound).sum() - expected) < 6 * math.sqrt(expected)


def test_normals_of_a_box_muller_pair_are_independent():
    """They share their radius, so their squares must not correlate either: below 6 / sqrt(n)."""
    half = noise._BLOCK // 2
    z = noise.gaussian(ROOT, 2 * half)
    squares = np.mean((z[:half] ** 2 - 1) * (z[half:] ** 2 - 1)) / 2
    assert abs(squares) < 6 / math.sqrt(half)
    for lag in (1, 2, half):  # and in whole blocks
        z = noise.gaussian(ROOT, 200_000)
        assert abs(np.mean(z[lag:] * z[:-lag])) < 6 / math.sqrt(200_000 - lag)


SCRIPT = """
import hashlib, sys
import numpy as np
from tests.kit.privacy_worlds import ROOT, make_plan
import tensorflow as tf
from fedemb.privacy.running import build_mechanism
tf.random.set_seed(0)
root = bytes.fromhex(sys.argv[1])
m = build_mechanism(make_plan(), root, "run", 0, "inputs")
jit = sys.argv[2] == "jit"

@tf.function(jit_compile=jit)
def clip(update):
    return m.record([update])

state = clip(tf.constant(np.linspace(-1, 1, 1000), tf.float32))
print(hashlib.sha256(m.aggregate(0, state).mean.tobytes()).hexdigest())
"""


def in_process(root: bytes, mode: str) -> str:
    return python("-c", SCRIPT, root.hex(), mode).split()[-1]


@pytest.mark.slow
def test_output_of_a_process_depends_only_on_its_key():
    """XLA gives every process the same stream; ours follows the key, jit on or off.

    See docs/privacy/noise.md#why-no-framework-draws-the-noise.
    """
    fresh = hashlib.sha256(b"another reservation").digest()
    one, same, other = (in_process(root, "plain") for root in (ROOT, ROOT, fresh))
    assert one == same
    assert one != other
    assert in_process(fresh, "jit") != in_process(ROOT, "jit")


def dispersion_p_value(counts: np.ndarray, trials: int, probability: float) -> float:
    """Two-sided p-value of the chi-square of counts against their binomial law."""
    mean, variance = trials * probability, trials * probability * (1 - probability)
    statistic = ((counts - mean) ** 2).sum() / variance
    tail = chi2.sf(statistic, len(counts))
    return 2 * min(tail, 1 - tail)


@pytest.mark.parametrize("q", [0.02, 0.25, 0.9])
def test_coins_come_up_with_the_planned_frequency(q):
    """Chi-square over virtual clients and over rounds, each at 1e-4."""
    plan = make_plan(sampling_probability=q, rounds=2000, virtual_clients=50)
    world = World([], 50)
    rounds = [sample(plan, ROOT, r, world) for r in range(2000)]
    per_round = np.array([len(clients) for clients in rounds])
    per_client = np.bincount([c.group for clients in rounds for c in clients], minlength=50)
    assert dispersion_p_value(per_round, 50, q) > 1e-4
    assert dispersion_p_value(per_client, 2000, q) > 1e-4
    observed = np.bincount(np.minimum(per_round, 50), minlength=51)
    expected = 2000 * binom.pmf(np.arange(51), 50, q)
    keep = expected > 5
    rest = 2000 - expected[keep].sum()
    pooled = [np.append(observed[keep], observed[~keep].sum()), np.append(expected[keep], rest)]
    if rest < 1:
        pooled = [observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()]
    assert chisquare(*pooled).pvalue > 1e-4
    for wrong in (q * 2 / 3, min(0.99, q * 3 / 2)):
        mean = 50 * 2000 * wrong
        spread = math.sqrt(mean * (1 - wrong))
        assert abs(per_round.sum() - mean) > 5 * spread


SAMPLERS = ("group_poisson_gaussian", "poisson_gaussian", "capped_image_poisson")


def took_part(kind: str, q: float, rounds: int, units: int) -> np.ndarray:
    """Which unit took part in which round, `[rounds, units]`, by the sampler of a mechanism."""
    changes = {"images_per_user": 1} if kind == SAMPLERS[2] else {}
    plan = make_plan(kind, rounds=rounds, virtual_clients=units, **changes)
    plan = plan.replaced(sampling_probability=q)
    world = World(range(units), units)
    table = np.zeros((rounds, units), bool)
    for number in range(rounds):
        table[number, [client.group for client in sample(plan, ROOT, number, world)]] = True
    return table


def preference_p_value(table: np.ndarray, q: float) -> float:
    """P-value of units that come up as often as others, and as often after a round with them."""
    rounds, units = table.shape
    each = dispersion_p_value(table.sum(axis=0), rounds, q)
    pairs, expected = (table[1:] & table[:-1]).sum(), (rounds - 1) * units * q**2
    again = 2 * poisson.sf(pairs - 1, expected) if pairs > expected else 1.0
    return 2 * min(each, again)


@pytest.mark.parametrize(("q", "rounds"), [(0.02, 500), (0.01, 3000)])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_units_are_sampled_with_equal_frequency(kind, q, rounds):
    assert preference_p_value(took_part(kind, q, rounds, 60), q) > 1e-4


@pytest.mark.parametrize(("q", "rounds"), [(0.02, 500), (0.01, 3000)])
@pytest.mark.parametrize("cheat", ["even twice, odd never", "a quarter twice", "twice in a row"])
def test_biased_sampler_is_found(cheat, q, rounds):
    """Each of 50 samplers that keep the mean count and prefer units has a p-value below 1e-6."""
    for seed in range(50):
        random = np.random.default_rng(seed)
        chances = np.full(60, q)
        if cheat == "even twice, odd never":
            chances = np.where(np.arange(60) % 2, 0.0, 2 * q)
        elif cheat == "a quarter twice":
            chances = np.where(np.arange(60) % 4, 2 * q / 3, 2 * q)
        table = random.random((rounds, 60)) < chances
        if cheat == "twice in a row":
            table[1::2] = table[::2]
        assert preference_p_value(table, q) < 1e-6


def _unevenness(low, high):
    """Root mean square of one over how many float64 normals are in each cell between the two."""
    ends = np.sort(np.abs(np.stack([low, high])), axis=0).view(np.int64)
    apart = np.sign(low) == np.sign(high)
    counts = np.maximum((ends[1] - ends[0])[apart], 1)
    return float(np.sqrt(np.mean(1.0 / counts.astype(np.float64) ** 2)))


@pytest.mark.long
@pytest.mark.parametrize("sigma", [1.0, 37.3, 1e4, 1e6])
def test_float32_release_hides_the_float64_grid_of_normals(sigma):
    """One float64 more or less in a cell is a likelihood that depends on the sum behind it.

    Sums are as long as the noise, so that some of them nearly cancel: there cells are narrowest.
    """
    scale, size = sigma * 2.0**32, 1 << 18
    sums = np.rint(np.random.default_rng(0).normal(size=size) * scale).astype(np.int64)
    noised = noise.add_rounded_noise(sums, b"n" * 32, scale)
    released = noised.astype(np.float32)
    half = np.maximum(np.spacing(np.abs(released)).astype(np.float64) / 2, 0.5)
    middle = released.astype(np.float64)
    assert _unevenness(*((middle + side * half - sums) / scale for side in (-1, 1))) < 2.0**-18
    # The whole numbers of the grid, in themselves, do show them.
    cells = ((noised - sums + side * 0.5) / scale for side in (-1, 1))
    assert _unevenness(*cells) > 2.0**-21 * min(sigma, 2.0**18)


# ---- Monte Carlo on worst-case data: the accountant's delta is attained, and not passed ----


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
def test_naive_price_is_refuted_by_an_attack(outcomes):
    """The claim at sensitivity C under ADD_OR_REMOVE is five times too small."""
    plan = make_plan(rounds=ROUNDS, sampling_probability=Q, noise_multiplier=SIGMA)
    naive = pld_of(plan.event(), Relation.ADD_OR_REMOVE_ONE).get_delta(EPSILON)
    gain = np.maximum(0, -np.expm1(EPSILON - losses(*outcomes, 1 / SIGMA)))
    assert gain.mean() - 5 * gain.std() / math.sqrt(RUNS) > 3 * naive
