"""Events, accountants and guarantees."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemb.errors import ArtifactError, ConfigError, UnsupportedAccounting
from fedemb.ledger.budget import renyi_epsilon
from fedemb.privacy import accounting, losses, noise
from fedemb.privacy.accounting import (
    epsilon_function,
    group_pair_rdp,
    price,
    rdp_of,
    supports,
    upper_bound,
)
from fedemb.privacy.guarantee import (
    SAMPLER_TOTAL_VARIATION,
    PrivacyGuarantee,
    event_from_json,
    event_to_json,
    largest_epsilon,
    sampler_delta,
    with_sampler_share,
)
from fedemb.privacy.losses import pld_of
from fedemb.privacy.planning import with_target_epsilon
from fedemb.privacy.unit_mechanisms import binomial_mixture
from tests.kit.privacy_worlds import make_plan


def group_event(q: float, sigma: float, rounds: int) -> dpe.DpEvent:
    return dpe.SelfComposedDpEvent(dpe.PoissonSampledDpEvent(q, dpe.GaussianDpEvent(sigma)), rounds)


# ---- events -------------------------------------------------------------------------------------

numbers = st.floats(1e-3, 1e3)
leaves = st.one_of(
    st.just(dpe.NoOpDpEvent()),
    st.just(dpe.NonPrivateDpEvent()),
    st.just(dpe.UnsupportedDpEvent()),
    st.builds(dpe.GaussianDpEvent, numbers),
    st.builds(dpe.ZCDpEvent, numbers, numbers),
    st.builds(dpe.SingleEpochTreeAggregationDpEvent, numbers, st.integers(1, 1000)),
    st.builds(
        dpe.MixtureOfGaussiansDpEvent,
        numbers,
        st.lists(numbers, min_size=1, max_size=3),
        st.lists(numbers, min_size=1, max_size=3),
    ),
)
events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(dpe.PoissonSampledDpEvent, st.floats(1e-6, 1), inner),
        st.builds(dpe.SelfComposedDpEvent, inner, st.integers(1, 10**6)),
        st.builds(dpe.ComposedDpEvent, st.lists(inner, max_size=3)),
        st.builds(
            dpe.SampledWithoutReplacementDpEvent,
            st.integers(1, 10**8),
            st.integers(1, 10**6),
            inner,
        ),
    ),
    max_leaves=6,
)


def test_guarantee_names_the_rounds():
    event = group_event(0.1, 4.0, 7)
    assert price(event, Relation.REPLACE_ONE, 1e-5).rounds == 7
    assert price(event, Relation.REPLACE_ONE, 1e-5, rounds=5).rounds == 5


@given(event=events)
def test_every_event_survives_json(event):
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, "1", None, True])
def test_events_with_bad_numbers_are_refused_in_both_directions(value):
    with pytest.raises(ArtifactError, match="noise_multiplier"):
        event_to_json(dpe.GaussianDpEvent(value))
    with pytest.raises(ArtifactError, match="noise_multiplier"):
        event_from_json({"type": "gaussian", "noise_multiplier": value})


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"type": "laplace", "noise_multiplier": 1.0},
        {"type": ["gaussian"]},
        {"type": "gaussian"},
        {"type": "gaussian", "noise_multiplier": 1.0, "module_name": "os"},
        {"type": "composed", "events": {"type": "no_op"}},
        {"type": "self_composed", "count": 0, "event": {"type": "no_op"}},
        {"type": "self_composed", "count": 1.5, "event": {"type": "no_op"}},
        {"type": "poisson_sampled", "sampling_probability": 1.1, "event": {"type": "no_op"}},
        {"type": "poisson_sampled", "sampling_probability": 0.0, "event": {"type": "no_op"}},
    ],
)
def test_malformed_event_json_is_refused(value):
    with pytest.raises(ArtifactError):
        event_from_json(value)


@pytest.mark.parametrize("number", [0, 1])
def test_recursive_events_are_refused(number):
    event, value = dpe.NoOpDpEvent(), {"type": "no_op"}
    for _ in range(100):
        event = (dpe.ComposedDpEvent([event]), dpe.SelfComposedDpEvent(event, 2))[number]
        composed = {"type": "composed", "events": [value]}
        value = (composed, {"type": "self_composed", "count": 2, "event": value})[number]
    with pytest.raises(ArtifactError, match="nested"):
        event_to_json(event)
    with pytest.raises(ArtifactError, match="nested"):
        event_from_json(value)


@pytest.mark.parametrize("value", [[], "", "1", {}, {"1": 2}, None, 1.0, [None], [math.nan], [-1]])
@pytest.mark.parametrize("field", ["sensitivities", "sampling_probs"])
def test_mixture_event_with_invalid_numbers_is_refused(field, value):
    fields = {"standard_deviation": 1.0, "sensitivities": [1.0], "sampling_probs": [1.0]}
    event_from_json({"type": "mixture_of_gaussians", **fields})
    with pytest.raises(ArtifactError, match=field):
        event_from_json({"type": "mixture_of_gaussians", **fields, field: value})


# ---- dispatch -----------------------------------------------------------------------------------

GAUSSIAN = dpe.GaussianDpEvent(2.0)
POISSON = dpe.PoissonSampledDpEvent(0.1, GAUSSIAN)
TWO = dpe.PoissonSampledDpEvent(0.1, dpe.ComposedDpEvent([GAUSSIAN, GAUSSIAN]))
FIXED = dpe.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN)
TREE = dpe.SingleEpochTreeAggregationDpEvent(3.0, 8)
MIXTURE = dpe.MixtureOfGaussiansDpEvent(9.0, [0.0, 1.0], [0.9, 0.1])
ADD, ONE, SPECIAL = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE, Relation.REPLACE_SPECIAL


@pytest.mark.parametrize(
    ("event", "relation", "pld", "rdp"),
    [
        (GAUSSIAN, ADD, True, True),
        (GAUSSIAN, ONE, True, False),
        (GAUSSIAN, SPECIAL, True, True),
        (POISSON, ADD, True, True),
        (POISSON, ONE, True, True),
        (POISSON, SPECIAL, False, False),
        (TWO, ADD, False, True),
        (TWO, ONE, False, False),
        (FIXED, ONE, False, True),
        (FIXED, ADD, False, False),
        (TREE, SPECIAL, False, True),
        (TREE, ONE, False, False),
        (dpe.ZCDpEvent(0.1), ADD, False, True),
        (dpe.RepeatAndSelectDpEvent(POISSON, 10, 0), ONE, False, False),
        (MIXTURE, ADD, True, False),
        (dpe.LaplaceDpEvent(1.0), ADD, False, False),
        (dpe.UnsupportedDpEvent(), ADD, False, False),
    ],
)
def test_accountants_support_exactly_the_listed_events_and_relations(event, relation, pld, rdp):
    assert supports(event, relation, "pld") is pld
    assert supports(event, relation, "rdp") is rdp
    for accountant, valid in (("pld", pld), ("rdp", rdp)):
        if valid:
            assert price(event, relation, 1e-6, accountant).epsilon > 0
        else:
            with pytest.raises(UnsupportedAccounting, match=relation.name):
                price(event, relation, 1e-6, accountant)
    if pld or rdp:  # curves and searches take the accountant that the price takes
        exact = price(event, relation, 1e-6, runs=1).epsilon
        assert exact * (1 - 1e-9) <= upper_bound(event, relation, 1e-6) <= exact * 1.001
    composed = dpe.ComposedDpEvent([dpe.NoOpDpEvent(), dpe.SelfComposedDpEvent(event, 2)])
    assert supports(composed, relation, "pld") is pld


def test_gaussian_under_replace_one_has_twice_the_sensitivity():
    """dp-accounting's RDP says 2.419 here, the add-or-remove value; the table keeps it out."""
    event = dpe.GaussianDpEvent(2.0)
    assert price(event, ONE, 1e-6).epsilon == pytest.approx(4.887, rel=1e-3)


def test_old_dp_accounting_is_refused(monkeypatch):
    monkeypatch.setattr(accounting.metadata, "version", lambda _: "0.4.3")
    with pytest.raises(UnsupportedAccounting, match=r"0\.4\.3"):
        price(GAUSSIAN, ADD, 1e-6)


def test_nonprivate_event_is_reported_as_infinite_epsilon():
    guarantee = price(dpe.NonPrivateDpEvent(), ADD, 1e-6)
    assert math.isinf(guarantee.epsilon)
    assert "no differential privacy" in str(guarantee)


# ---- values -------------------------------------------------------------------------------------


def test_worked_example_of_the_accounting_page_is_reproduced():
    """docs/privacy/accounting.md#worked-example: n = 1e5, 2048 users a round, T = 1000."""
    delta = 1e5**-1.1
    for sigma, ours, by_renyi, doubled in ((2.0, 2.85, 3.07, 4.29),):
        event = group_event(0.02048, sigma, 1000)
        assert price(event, ONE, delta).epsilon == pytest.approx(ours, rel=2e-3)
        assert price(event, ONE, delta, "rdp").epsilon == pytest.approx(by_renyi, rel=3e-3)
        two = group_event(0.02048, sigma / 2, 1000)
        assert price(two, ADD, delta).epsilon == pytest.approx(doubled, rel=3e-3)


def test_shuffled_passes_cost_more_than_poisson_sampling():
    """docs/explanation/dp_sgd.md: ten passes of ten batches at noise multiplier 1.2.

    A pass is one round on all units, because it may be known which batch a unit is in.
    """
    shuffled, poisson = dpe.GaussianDpEvent(1.2 / math.sqrt(10)), group_event(0.1, 1.2, 100)
    for event, epsilon in ((shuffled, 14.1), (poisson, 5.08)):
        found = price(event, ADD, 1e-5).epsilon
        assert found == pytest.approx(epsilon, rel=3e-3)


def test_sampler_share_is_taken_out_of_delta():
    event, relation, delta = group_event(0.02, 2.0, 100), ONE, 1e-13
    guarantee = price(event, relation, delta)
    epsilon, share = guarantee.epsilon, guarantee.sampler_delta
    assert guarantee.delta == delta
    assert share == 2.0**-51 * (1 + math.exp(epsilon))
    # What ideal noise has at this epsilon, and the share: together they are no more than delta.
    ideal = pld_of(event, relation).get_delta(epsilon)
    assert 0.9 * delta < ideal + share <= delta
    with pytest.raises(ValueError, match="noise sampler"):
        price(event, relation, 2.0**-51)


@pytest.mark.parametrize("runs", [1, 52, 1000])
def test_sampler_share_grows_with_epsilon_and_runs(runs):
    """At epsilon 8 and a delta for 1e8 users, a share without exp(epsilon) would be too small."""
    delta, divergence, order = 1.6e-9, 2.0, 8.0
    epsilon = with_sampler_share(lambda d: renyi_epsilon(divergence, order, d), delta, runs)
    left = delta - runs * 2.0**-51 * (1 + math.exp(epsilon))
    assert renyi_epsilon(divergence, order, left) <= epsilon
    assert epsilon == pytest.approx(renyi_epsilon(divergence, order, left), rel=1e-4)


def test_sampler_error_covers_the_maximum_number_of_normals():
    assert SAMPLER_TOTAL_VARIATION == noise.MAX_NORMALS * noise.TOTAL_VARIATION_PER_NORMAL


@pytest.mark.parametrize("delta", [1.13e-18, 8.8e-16])
def test_delta_below_the_samplers_share_is_refused_with_the_limit(delta):
    with pytest.raises(ConfigError, match=r"8\.9e-16") as error:
        price(GAUSSIAN, ADD, delta)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-13])
def test_largest_epsilon_is_where_the_share_is_all_of_delta(delta):
    assert sampler_delta(largest_epsilon(delta, 1), 1) == pytest.approx(delta)
    beyond = largest_epsilon(delta, 1) + 1e-6
    assert with_sampler_share(lambda d: beyond, delta, 1) == math.inf


@pytest.mark.long
@pytest.mark.parametrize("target", [1000.0, 23.6])
def test_target_that_the_sampler_does_not_allow_is_refused_with_both_figures(target):
    plan = make_plan("poisson_gaussian", rounds=100)
    with pytest.raises(ConfigError, match=f"target_epsilon={target:g} .* at most 2[23]"):
        with_target_epsilon(plan, target, 1e-5)


def test_infinite_epsilon_names_the_limit_at_its_delta():
    text = str(price(group_event(0.01, 0.5, 10_000), ADD, 1e-13))
    assert "infinite" in text
    assert "5.41" in text
    assert "1e-13" in text


def test_huge_epsilon_exceeds_the_sampler_precision():
    assert with_sampler_share(lambda d: 40.0, 1e-5, 1) == math.inf
    assert with_sampler_share(lambda d: 1e4, 1e-5, 1) == math.inf
    assert with_sampler_share(lambda d: math.inf, 1e-5, 1) == math.inf
    assert math.isnan(with_sampler_share(lambda d: math.nan, 1e-5, 1))


@pytest.mark.parametrize("delta", [0.0, -1e-6, 1.0, math.nan, math.inf])
def test_bad_deltas_are_refused(delta):
    with pytest.raises(ValueError, match="delta"):
        price(GAUSSIAN, ADD, delta)


def test_price_curve_contains_the_plan_and_decreases():
    event, relation = group_event(0.02, 2.0, 50), ONE
    epsilons = [*map(epsilon_function(event, relation), (1e-4, 1e-6, 1e-8))]
    assert epsilons[1] == price(event, relation, 1e-6).epsilon
    assert epsilons == sorted(epsilons)
    assert pld_of(event, relation).get_delta(epsilons[1]) == pytest.approx(1e-6, rel=1e-2)


def test_group_pair_rdp_at_full_sampling_equals_the_closed_form():
    orders = np.array([1.5, 2.0, 8.0, 64.0])
    np.testing.assert_allclose(group_pair_rdp(1.0, 2.0, orders), orders * 4 / (2 * 4), rtol=1e-12)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.3, 0.5), (0.999, 3.0), (1e-4, 0.4)])
def test_renyi_quadrature_matches_plain_sums(q, sigma):
    """Against the densities themselves, unlogged, in 80-bit floats on a grid 40 times finer."""
    order = 4.5
    x = np.arange(-30 * sigma - 1, 2 * order + 30 * sigma, sigma**2 / 80).astype(np.longdouble)

    def density(shift):
        return (1 - q) * np.exp(-(x**2) / (2 * sigma**2)) + q * np.exp(
            -((x - shift) ** 2) / (2 * sigma**2)
        )

    integrand = density(1.0) ** order * density(-1.0) ** (1 - order)
    total = np.sum(integrand) * (x[1] - x[0]) / (sigma * math.sqrt(2 * math.pi))
    expected = float(np.log(total)) / (order - 1)
    assert group_pair_rdp(q, sigma, np.array([order]))[0] == pytest.approx(expected, rel=1e-6)


def test_renyi_needs_orders_above_one():
    with pytest.raises(ValueError, match="above 1"):
        rdp_of(POISSON, ONE, [1.0, 2.0])


@settings(max_examples=5, deadline=None)
@given(
    q=st.floats(0.01, 0.3),
    sigma=st.floats(3, 6),
    rounds=st.integers(2, 20),
    factor=st.floats(1.1, 2),
)
def test_epsilon_falls_with_noise_and_grows_with_rounds_and_sampling(q, sigma, rounds, factor):
    def epsilon(*arguments):
        return price(group_event(*arguments), ONE, 1e-6).epsilon

    base = epsilon(q, sigma, rounds)
    assert epsilon(q, sigma * factor, rounds) < base
    assert epsilon(q, sigma, 2 * rounds) > base
    assert epsilon(min(1.0, q * factor), sigma, rounds) > base


@settings(max_examples=5, deadline=None)
@given(q=st.floats(0.01, 0.3), sigma=st.floats(3, 6), rounds=st.integers(1, 20))
def test_price_lies_between_naive_and_doubled_sensitivity(q, sigma, rounds):
    """PLD at sensitivity C is too small, users grouped after sampling (2C) costs more."""

    def add(noise):
        return price(group_event(q, noise, rounds), ADD, 1e-6).epsilon

    honest = price(group_event(q, sigma, rounds), ONE, 1e-6)
    assert add(sigma) * 0.999 <= honest.epsilon <= add(sigma / 2) * 1.001
    renyi = price(group_event(q, sigma, rounds), ONE, 1e-6, "rdp")
    assert honest.epsilon <= renyi.epsilon * 1.02


# ---- sentences ----------------------------------------------------------------------------------


def test_guarantee_sentence_states_all_parameters():
    text = str(price(group_event(0.02, 1.0, 100), ONE, 1e-6))
    for part in ("1e-06", "one user", "added or removed", "100 rounds", "PLD", "REPLACE_ONE"):
        assert part in text


def test_guarantee_survives_json_and_refuses_another_field_or_unit():
    guarantee = price(group_event(0.02, 1.0, 100), ONE, 1e-6)
    value = guarantee.to_json()
    assert PrivacyGuarantee.from_json(value) == guarantee
    with pytest.raises(ArtifactError, match="unit"):
        PrivacyGuarantee.from_json({**value, "unit": "unknown"})
    with pytest.raises(ArtifactError, match="field"):
        PrivacyGuarantee.from_json({**value, "waiver": True})


@pytest.mark.parametrize("noise_multiplier", [0.0005, 0.012, 0.1])
def test_epsilon_of_almost_no_noise_is_above_500(noise_multiplier):
    event = dpe.SelfComposedDpEvent(
        dpe.PoissonSampledDpEvent(0.2, dpe.GaussianDpEvent(noise_multiplier)), 60
    )
    assert price(event, ONE, 1e-5).epsilon > 500


QUICK = [
    (group_event(0.02, 1.0, 200), ONE),
    (group_event(0.0003, 1.0, 200), ONE),
    (group_event(0.02, 0.5, 200), ADD),
    (dpe.GaussianDpEvent(0.4), ADD),
    (dpe.ComposedDpEvent([group_event(0.05, 3.0, 40), POISSON]), ONE),
    (dpe.SelfComposedDpEvent(binomial_mixture(8, 0.05, 16.0), 300), ADD),
]


@pytest.mark.parametrize(("event", "relation"), QUICK, ids=range(len(QUICK)))
def test_quick_bound_is_pessimistic_and_close(event, relation):
    exact, quick = price(event, relation, 1e-6).epsilon, upper_bound(event, relation, 1e-6)
    # Each is an upper bound; the truth is below the fine grid's by less than its own error.
    assert exact * (1 - 1e-5) <= quick <= exact * (1 + losses.QUICK_TOLERANCE)
    if isinstance(event, dpe.GaussianDpEvent):
        assert quick >= get_epsilon_gaussian(event.noise_multiplier, 1e-6)


def test_quick_bound_keeps_the_dispatch_table_and_the_sampler_share():
    with pytest.raises(UnsupportedAccounting):
        upper_bound(dpe.LaplaceDpEvent(1.0), ADD, 1e-6)
    with pytest.raises(ValueError, match="sampler"):
        upper_bound(GAUSSIAN, ADD, 2.0**-51)
    assert math.isinf(upper_bound(dpe.NonPrivateDpEvent(), ADD, 1e-6))
    assert upper_bound(FIXED, ONE, 1e-6) == pytest.approx(price(FIXED, ONE, 1e-6).epsilon)


def test_loss_grid_is_finest_for_noise_multipliers_from_0_3():
    for noise_multiplier in (0.3, 1.0, 20.0):
        event = dpe.SelfComposedDpEvent(dpe.GaussianDpEvent(noise_multiplier), 1000)
        assert losses.discretisation(event) == losses.DISCRETISATION


@pytest.mark.parametrize("order", [1.01, 1.5, 2.0, 20.0])
@pytest.mark.parametrize("q", [1e-3, 0.2, 0.9])
def test_small_noise_divergence_equals_the_quadrature(q, order, monkeypatch):
    """At noise multiplier 0.003 the quadrature would take gigabytes; where both can, they agree."""
    one_order = accounting._one_order.__wrapped__
    closed = one_order(q, 0.02, order)
    monkeypatch.setattr(accounting, "_NO_OVERLAP", 0.0)
    assert closed == pytest.approx(one_order(q, 0.02, order), rel=1e-12)
    monkeypatch.undo()
    assert np.isfinite(group_pair_rdp(q, 0.003, np.array([order, 1024.0]))).all()
