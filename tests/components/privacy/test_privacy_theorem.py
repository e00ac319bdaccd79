"""The sensitivity theorem of docs/privacy/theorem.md#statement, checked numerically."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedemb.privacy.losses import pld_of


def hockey_stick(q: float, first: float, second: float, alpha: float) -> float:
    """H_alpha(P_a || P_b) for shifts on a line, noise of standard deviation 1, by quadrature."""
    x = np.linspace(-14, 14, 20001)
    base = (1 - q) * norm.pdf(x)
    gap = base + q * norm.pdf(x, first) - alpha * (base + q * norm.pdf(x, second))
    return float(np.trapezoid(np.maximum(gap, 0), x))


def worst(q: float, c: float, alpha: float) -> float:
    """The antipodal pair in closed form: the best half-space, found on a grid and polished."""
    return hockey_stick(q, c, -c, alpha)


@settings(max_examples=150, deadline=None)
@given(
    q=st.floats(0.001, 1.0),
    c=st.floats(0.1, 3.0),
    first=st.floats(-1, 1),
    second=st.floats(-1, 1),
    alpha=st.floats(0.0, 20.0),
)
def test_no_pair_of_shifts_on_a_line_beats_the_antipodal_one(q, c, first, second, alpha):
    assert hockey_stick(q, c * first, c * second, alpha) <= worst(q, c, alpha) + 1e-6


def test_no_pair_of_shifts_in_the_plane_beats_the_antipodal_one():
    """Grid over angles and lengths in two dimensions, where half-spaces can be tilted."""
    q, c = 0.2, 1.3
    axis = np.linspace(-8, 8, 201)
    x, y = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def mixture(a):
        return (1 - q) * norm.pdf(x) * norm.pdf(y) + q * norm.pdf(x - a[0]) * norm.pdf(y - a[1])

    for alpha in (0.9, 1.0, 1.2, 2.0):
        bound = worst(q, c, alpha)
        for angle in np.linspace(0, math.pi, 9):
            for length in (0.3, 0.7, 1.0):
                a = (c, 0.0)
                b = (c * length * math.cos(angle), c * length * math.sin(angle))
                for one, other in ((a, b), (b, a)):
                    gap = mixture(one) - alpha * mixture(other)
                    assert np.maximum(gap, 0).sum() * cell <= bound + 1e-4


@pytest.mark.parametrize("q", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_dp_accounting_computes_this_pair_under_replace_one(q, sigma, epsilon):
    event = dpe.PoissonSampledDpEvent(q, dpe.GaussianDpEvent(sigma))
    ours = worst(q, 1 / sigma, math.exp(epsilon))
    theirs = pld_of(event, Relation.REPLACE_ONE).get_delta(epsilon)
    assert ours <= theirs * (1 + 1e-4) + 1e-9
    assert theirs == pytest.approx(ours, rel=5e-3, abs=1e-7)


def test_users_grouped_after_sampling_are_worse_than_the_antipodal_pair():
    """The 2C pair N(0) against (1-q) N(0) + q N(2c) is not dominated: a test of the test."""
    q, c, alpha = 0.05, 1.0, math.e
    x = np.linspace(-14, 14, 20001)
    shifted = (1 - q) * norm.pdf(x) + q * norm.pdf(x, 2 * c)
    doubled = float(np.trapezoid(np.maximum(shifted - alpha * norm.pdf(x), 0), x))
    assert doubled > 1.5 * worst(q, c, alpha)
