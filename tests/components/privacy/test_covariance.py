"""The one-round projection: its price, how far one user moves the sum, and what is solved."""

import numpy as np
import pytest
from scipy.stats import norm
from threadpoolctl import threadpool_limits

from fedemb.errors import ConfigError
from fedemb.privacy import feature_sums as sums
from fedemb.privacy.prices import guarantee_of
from fedemb.privacy.sampling import sample
from fedemb.privacy.unit_mechanisms import Covariance
from studies.shared import Cohort
from tests.kit.privacy_worlds import ROOT, World, make_plan

GRID, DIM = 32, 6


# ---- sensitivity --------------------------------------------------------------------------------


def worlds():
    """Users that could move a sum furthest: long, short, opposite, one image, many, not finite."""
    random = np.random.default_rng(0)
    for user in range(40):
        images = 1 + user % 7
        features = random.normal(size=(images, DIM)) * 10.0 ** random.uniform(-3, 6)
        yield features, random.integers(0, 2, images)
    yield np.array([[9.0, 0, 0, 0, 0, 0], [-9.0, 0, 0, 0, 0, 0]]), np.zeros(2, int)
    yield np.tile([9.0, 0, 0, 0, 0, 0], (5, 1)), np.zeros(5, int)
    # A mean and a covariance, both at their limits.
    corner = [[0.8, y, 0, 0, 0, 0] for y in (0.6, -0.6)]
    yield np.array(corner), np.zeros(2, int)


def record(features, labels, **changes):
    return sums.covariance_record(features, np.asarray(labels), **({"grid_bits": GRID} | changes))[
        0
    ]


def covariance_norm(features):
    """Norm of the covariance of images with one label."""
    return sums.covariance_record(features, np.zeros(len(features), int), grid_bits=GRID)[1]


def furthest(record_of=record, **changes):
    """The most that one user adds to a sum, in clips."""
    return max(
        np.linalg.norm(record_of(*user, **changes).astype(float)) / 2.0**GRID for user in worlds()
    )


def test_user_changes_the_sum_by_at_most_the_clip():
    assert 0.9 < furthest() <= 1.0  # nearly reached, so little noise is wasted


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_rounding_to_a_coarse_grid_keeps_records_within_the_clip(bits):
    """Entries are cut toward zero; rounded to the nearest, a record could grow."""
    random = np.random.default_rng(6)
    for images in (1, 2, 3, 5) * 20:
        found = record(5.0 * random.normal(size=(images, DIM)), np.zeros(images), grid_bits=bits)
        assert np.linalg.norm(found.astype(float)) <= 2.0**bits


def test_covariance_record_ignores_image_order():
    random = np.random.default_rng(2)
    features, labels = random.normal(size=(9, DIM)), np.arange(9) % 2
    order = random.permutation(9)
    np.testing.assert_array_equal(record(features, labels), record(features[order], labels[order]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_user_with_nonfinite_features_adds_nothing(bad):
    features = np.ones((3, DIM))
    features[1, 2] = bad
    assert not record(features, [0, 0, 0]).any()
    assert covariance_norm(features) == 0.0


def test_user_without_images_adds_nothing():
    assert not record(np.zeros((0, DIM)), np.zeros(0, int)).any()


def test_too_many_images_are_refused():
    with pytest.raises(ConfigError, match="max_images_per_user"):
        record(np.zeros((8193, DIM)), np.zeros(8193, int))


# ---- what is solved -----------------------------------------------------------------------------


def parts(found, weight=sums.MEAN_WEIGHT, largest=sums.COVARIANCE_NORM):
    """Mean and covariance of a record, in units of the features."""
    whole = found * np.hypot(1.0, weight) / 2.0**GRID
    matrix = np.zeros((DIM, DIM))
    matrix[np.triu_indices(DIM)] = whole[DIM:] * largest
    matrix = matrix / np.sqrt(2.0)
    matrix = matrix + matrix.T
    matrix[np.diag_indices(DIM)] /= np.sqrt(2.0)
    return whole[:DIM] / weight, matrix


def test_record_is_mean_and_covariance_around_the_mean_of_each_label():
    random = np.random.default_rng(3)
    features = random.normal(size=(12, DIM))
    features *= 0.25 / np.linalg.norm(features, axis=1, keepdims=True)
    labels = np.repeat([4, 9], [8, 4])
    mean, covariance = parts(record(features, labels))
    np.testing.assert_allclose(mean, features.mean(0), atol=1e-5)
    wanted = sum(
        np.cov(features[labels == label].T, bias=True) * share
        for label, share in ((4, 8 / 12), (9, 4 / 12))
    )
    np.testing.assert_allclose(covariance, wanted, atol=1e-5)


def test_norm_before_the_clip_is_that_of_the_covariance():
    random = np.random.default_rng(6)
    features = random.normal(size=(50, DIM)) @ random.normal(size=(DIM, DIM)) * 0.02
    wanted = np.linalg.norm(np.cov(features.T, bias=True))
    assert covariance_norm(features) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("ridge", [0.0, 2e-4])
def test_solved_projection_whitens_the_covariance_and_removes_the_mean(ridge):
    random = np.random.default_rng(4)
    turned, _ = np.linalg.qr(random.normal(size=(DIM, DIM)))
    shape = np.diag([0.3, 0.2, 0.1, 0.05, 0.02, 0.01]) @ turned
    features = (0.1 + random.normal(size=(8192, DIM)) @ shape) / 8
    found = record(features, np.zeros(8192, int))
    kernel = sums.solve_whitening(found / 2.0**GRID, features=DIM, ridge=ridge)
    np.testing.assert_allclose((features @ kernel).mean(0), 0.0, atol=1e-3)
    covariance = np.cov(features.T, bias=True)
    level = sums.SHRINKAGE * np.trace(covariance) / DIM
    level += ridge * np.hypot(1.0, sums.MEAN_WEIGHT) * sums.COVARIANCE_NORM
    values, vectors = np.linalg.eigh(covariance)
    wanted = vectors @ np.diag((values.min() + level) ** 0.5 / (values + level) ** 0.5) @ vectors.T
    mean = features.mean(0)
    wanted -= np.outer(mean, mean @ wanted) / mean.dot(mean)
    np.testing.assert_allclose(kernel, wanted, rtol=0.02, atol=0.01)


def test_noise_alone_is_solved_without_infinite_weights():
    random = np.random.default_rng(5)
    for scale in (1.0, 0.0):
        mean = scale * random.normal(size=sums.covariance_size(DIM))
        assert np.isfinite(sums.solve_whitening(mean, features=DIM, ridge=0.0)).all()


# ---- The one-round head ----


@pytest.mark.parametrize(
    ("noise", "epsilon"), [(3.732, 1.0), (1.994, 2.0), (1.082, 4.0), (0.600, 8.0)]
)
def test_epsilon_equals_the_analytic_gaussian_mechanism(noise, epsilon):
    """Against the exact trade of epsilon and delta (Balle and Wang, arXiv 1805.06530)."""
    cohort = Cohort(
        population=50_000, users_per_client=1, clients_per_round=50_000,
        noise_multiplier=noise, rounds=7,
    )  # fmt: skip
    plan = cohort.plan(Covariance)
    assert (plan.rounds, plan.normalizer) == (1, 50_000.0)
    found = guarantee_of(plan, 1e-5).epsilon
    assert found == pytest.approx(epsilon, rel=2e-3)
    half = 1 / (2 * noise)
    delta = norm.cdf(half - found * noise) - np.exp(found) * norm.cdf(-half - found * noise)
    assert delta == pytest.approx(1e-5, rel=0.02)


def test_every_user_participates_in_the_only_round():
    plan = make_plan("covariance")
    world = World(range(50), 40)
    assert [int(unit.users[0]) for unit in sample(plan, ROOT, 0, world)] == [*range(50)]
    assert plan.normalizer == 80.0  # planned, and not the 50 who are there
    with pytest.raises(ConfigError, match="rounds"):
        plan.replaced(rounds=2)


# ---- what is solved -----------------------------------------------------------------------------


def test_solution_has_the_same_bits_with_any_number_of_blas_threads():
    """Resumption and audit compare bits, on machines with other numbers of cores."""
    kernels = set()
    covariance = np.random.default_rng(0).normal(size=sums.covariance_size(700))
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="blas"):
            solved = sums.solve_whitening(covariance, features=700, ridge=0.1)
            kernels.add(solved.tobytes())
    assert len(kernels) == 1
