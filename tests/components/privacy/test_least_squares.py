"""The one-round head: its price, how far one unit moves the sum, and what is solved from it."""

import numpy as np
import pytest
from scipy.stats import norm

from fedemb.errors import ConfigError
from fedemb.privacy import feature_sums as moments
from fedemb.privacy.prices import guarantee_of
from fedemb.privacy.sampling import sample
from fedemb.privacy.unit_mechanisms import Covariance, LeastSquares
from studies.shared import Cohort
from tests.kit.privacy_worlds import ROOT, World, make_plan

GRID, CLASSES = 32, 3


@pytest.mark.parametrize("mechanism", [LeastSquares, Covariance])
@pytest.mark.parametrize(
    ("noise", "epsilon"), [(3.732, 1.0), (1.994, 2.0), (1.082, 4.0), (0.600, 8.0)]
)
def test_price_is_that_of_one_gaussian(noise, epsilon, mechanism):
    """Against the exact trade of epsilon and delta (Balle and Wang, arXiv 1805.06530)."""
    cohort = Cohort(
        population=50_000, users_per_client=1, clients_per_round=50_000, noise_multiplier=noise,
        rounds=7,
    )  # fmt: skip
    plan = cohort.plan(mechanism)
    assert (plan.rounds, plan.normalizer) == (1, 50_000.0)
    found = guarantee_of(plan, 1e-5).epsilon
    assert found == pytest.approx(epsilon, rel=2e-3)
    half = 1 / (2 * noise)
    delta = norm.cdf(half - found * noise) - np.exp(found) * norm.cdf(-half - found * noise)
    assert delta == pytest.approx(1e-5, rel=0.02)


@pytest.mark.parametrize("kind", ["least_squares", "covariance"])
def test_there_is_one_round_and_everybody_is_in_it(kind):
    plan = make_plan(kind)
    world = World(range(50), 40)
    assert [int(unit.users[0]) for unit in sample(plan, ROOT, 0, world)] == [*range(50)]
    assert plan.normalizer == 80.0  # planned, and not the 50 who are there
    with pytest.raises(ConfigError, match="rounds"):
        plan.replaced(rounds=2)


# ---- sensitivity --------------------------------------------------------------------------------


def worlds():
    """Units that could move a sum furthest: long, short, aligned, many images, not finite."""
    random = np.random.default_rng(0)
    features = random.normal(size=(40, 4, 6)) * 10.0 ** random.uniform(-3, 6, (40, 1, 1))
    labels = random.integers(0, CLASSES, (40, 4))
    for unit in range(40):
        labels[unit, 1 + unit % 4 :] = -1
    features[0, :] = [1e9, 0, 0, 0, 0, 0]
    labels[0] = 1  # four times the same image, at one corner
    features[1, 0, 2], features[2, 0, 0], features[3, 0, 0] = np.nan, np.inf, 1e200
    return features, labels


def summed(units, total=moments.moment_sum):
    features, labels = worlds()
    return total(features[units], labels[units], classes=CLASSES, grid_bits=GRID)


def moved_furthest(total=moments.moment_sum):
    """The most that leaving out one unit moves the sum of the rest, in clips."""
    everybody = np.arange(40)
    whole = summed(everybody, total)
    return (
        max(
            np.linalg.norm((whole - summed(np.delete(everybody, unit), total)).astype(float))
            for unit in everybody
        )
        / 2.0**GRID
    )


def test_no_unit_moves_the_sum_by_more_than_the_clip():
    assert 0.999 < moved_furthest() <= 1.0  # reached, so no noise is wasted


def test_planted_two_parts_with_one_clip_each_are_found_out():
    """Second moments and label products each scaled to the clip: together longer by sqrt 2."""

    def apart(features, labels, *, grid_bits, **options):
        return moments.moment_sum(features, labels, grid_bits=grid_bits + 0.5, **options)

    assert moved_furthest(apart) == pytest.approx(np.sqrt(2), rel=1e-3)


def test_planted_sum_over_images_is_found_out():
    """Images of a unit added and not averaged: a unit of four images counts four times."""

    def each(features, labels, **options):
        return moments.moment_sum(features.reshape(-1, 1, 6), labels.reshape(-1, 1), **options)

    assert moved_furthest(each) > 3.9


@pytest.mark.parametrize(("images", "fits"), [(8, True), (9, False)])
def test_a_sum_that_might_not_be_exact_is_refused(images, fits):
    """Whole numbers of up to 50 bits: eight of them stay below 2^53."""
    features, labels = np.ones((images, 1, 2)), np.zeros((images, 1), np.int64)
    options = {"classes": CLASSES, "grid_bits": 50}
    if fits:
        moments.moment_sum(features, labels, **options)
    else:
        with pytest.raises(ConfigError, match="too many for one exact sum"):
            moments.moment_sum(features, labels, **options)


def test_units_that_are_not_finite_add_nothing():
    for unit in (1, 2, 3):
        assert not summed([unit]).any()


def test_sum_has_no_order_and_is_exact():
    """Units in any order and any split give the same integers as Python's own."""
    everybody = np.arange(40)
    whole = summed(everybody)
    shuffled = np.random.default_rng(1).permutation(everybody)
    np.testing.assert_array_equal(summed(shuffled[:13]) + summed(shuffled[13:]), whole)
    features, labels = worlds()
    vectors, weights = moments.whole_vectors(features, labels >= 0, grid_bits=GRID)
    rows = vectors.shape[-1]
    exact = [[0] * (rows + CLASSES) for _ in range(rows)]
    for vector, weight, label in zip(
        vectors.reshape(-1, rows), weights.ravel(), labels.ravel(), strict=True
    ):
        wanted = [int(x) for x in vector]
        right = [*wanted, *[int(weight) * (label == c) for c in range(CLASSES)]]
        for i in range(rows):
            for j in range(rows + CLASSES):
                exact[i][j] += wanted[i] * int(right[j])
    found = np.concatenate(
        [whole[: rows * rows].reshape(rows, rows), whole[rows * rows :].reshape(rows, CLASSES)], 1
    )
    np.testing.assert_array_equal(found, np.array(exact, np.int64))


# ---- what is solved -----------------------------------------------------------------------------


def test_without_noise_the_ridge_solution_comes_back():
    random = np.random.default_rng(3)
    features = random.normal(size=(300, 1, 5))
    features /= 1.01 * np.linalg.norm(features, axis=-1, keepdims=True)
    labels = (features[..., 0] > 0).astype(int)
    total = moments.moment_sum(features, labels, classes=2, grid_bits=GRID)
    mean = total / 2.0**GRID / 300
    kernel, bias = moments.solve_moments(mean, classes=2, ridge=1e-3)
    vectors = np.concatenate([features[:, 0], np.full((300, 1), 0.3)], 1) / np.sqrt(1.09)
    scale = np.sqrt(2.0)
    against = np.eye(2)[labels[:, 0]]
    wanted = np.linalg.solve(
        vectors.T @ vectors / (300 * scale) + 1e-3 * np.eye(6), vectors.T @ against / (300 * scale)
    ) / np.sqrt(1.09)
    np.testing.assert_allclose(kernel, wanted[:-1], atol=1e-4)
    np.testing.assert_allclose(bias, wanted[-1] * 0.3, atol=1e-4)
