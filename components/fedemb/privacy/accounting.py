"""Computes epsilon of an event under a relation; raises if no accountant is valid for the pair.

Dispatch table (docs/privacy/accounting.md#which-accountant-is-valid); each entry is tested:

| event                               | PLD                    | RDP                    |
|-------------------------------------|------------------------|------------------------|
| Gaussian                            | all                    | ADD_OR_REMOVE, SPECIAL |
| PoissonSampled(Gaussian)            | ADD_OR_REMOVE, ONE     | ADD_OR_REMOVE, ONE *   |
| PoissonSampled(Composed)            |                        | ADD_OR_REMOVE          |
| SampledWithoutReplacement(Gaussian) |                        | ONE                    |
| SingleEpochTree                     |                        | SPECIAL                |
| MixtureOfGaussians                  | ADD_OR_REMOVE, SPECIAL |                        |
| ZCDp                                |                        | all                    |

ONE and SPECIAL are REPLACE_ONE and REPLACE_SPECIAL; * is the project's quadrature in `renyi`.
dp-accounting's RDP of a Gaussian under REPLACE_ONE is the add-or-remove value, half of the correct
value, so that cell is empty (docs/privacy/accounting.md#traps-of-the-libraries).
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Sequence
from importlib import metadata
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
from absl import logging
from dp_accounting import dp_event as dpe
from dp_accounting import rdp
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant as _rdp
from jaxtyping import Float64

from fedemb.errors import UnsupportedAccounting
from fedemb.privacy.guarantee import PrivacyGuarantee, sampler_delta, with_sampler_share
from fedemb.privacy.losses import pld_of, quick_epsilon
from fedemb.privacy.section import Unit

Floats = npt.NDArray[np.float64]
AccountantName = Literal["auto", "pld", "rdp"]

MINIMUM_VERSION = (0, 6, 0)
"""Minimum dp-accounting version: older ones cannot price Poisson sampling under REPLACE_ONE."""
RDP_ORDERS: Floats = np.array(
    [1 + x / 20 for x in range(1, 200)]
    + list(range(11, 64))
    + [64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512, 768, 1024],
    dtype=np.float64,
)
"""Renyi orders that `price` minimises over."""

_ADD, _ONE, _SPECIAL = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
)


def library_version() -> str:
    """Returns the version of dp-accounting.

    Raises:
      UnsupportedAccounting: the version is older than 0.6.0.
    """
    version = metadata.version("dp-accounting")
    digits = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if digits < MINIMUM_VERSION:
        raise UnsupportedAccounting(
            f"dp-accounting {version} cannot price this project's mechanism; install 0.6.0 or "
            "later, as locked in requirements/"
        )
    return version


def price(
    event: dpe.DpEvent,
    relation: NeighboringRelation,
    delta: float,
    accountant: AccountantName = "auto",
    *,
    runs: int = 1,
    rounds: int | None = None,
    unit: Unit = "user",
) -> PrivacyGuarantee:
    """Computes the privacy guarantee of an event.

    Args:
      event: event on the data of one unit, executed or planned.
      relation: neighbouring relation of the event.
      delta: total failure probability. The sampler's share is subtracted before accounting, so the
          guarantee holds at this delta for the noise that is actually drawn.
      accountant: `auto` uses PLD if it is valid, since it is tighter, otherwise RDP.
      runs: number of training runs in the event; each has its share of the sampler. 0
          assumes ideal noise, as published figures do; drawn noise is never ideal.
      rounds: number of training rounds, for display; by default the repetitions of the event.
      unit: privacy unit of the event.

    Returns:
      The guarantee; its epsilon is infinite if part of the event has no privacy.

    Raises:
      UnsupportedAccounting: no accountant, or not the requested one, is valid for the pair.
      DeltaTooSmall: delta is not a probability above the sampler's share.
    """
    curve_ = _Curve(event, relation, accountant)
    epsilon = curve_.epsilon(delta, runs)
    return PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        relation=relation,
        accountant=curve_.accountant,
        rounds=getattr(event, "count", None) if rounds is None else rounds,
        unit=unit,
        sampler_delta=sampler_delta(epsilon, runs) if math.isfinite(epsilon) else 0.0,
    )


def upper_bound(event: dpe.DpEvent, relation: NeighboringRelation, delta: float) -> float:
    """Returns an upper bound on epsilon close to that of `price`, for curves and searches.

    PLD gives at most 0.1 % more than `price`, in a fraction of its time, see
    `losses.quick_epsilon`; RDP is used if only RDP is valid. Never report it as a guarantee.

    Raises:
      UnsupportedAccounting: no accountant is valid for the pair.
      DeltaTooSmall: delta is not a probability above the sampler's share.
    """
    return _Curve(event, relation, "auto", quick=True).epsilon(delta, 1)


def epsilon_function(
    event: dpe.DpEvent, relation: NeighboringRelation, accountant: AccountantName = "auto"
) -> Callable[[float], float]:
    """Returns epsilon as a function of delta, as in `price`; the event is composed once.

    Raises:
      UnsupportedAccounting: no accountant, or not the requested one, is valid for the pair.
    """
    curve_ = _Curve(event, relation, accountant)
    return lambda delta: curve_.epsilon(delta, 1)


def rdp_of(
    event: dpe.DpEvent, relation: NeighboringRelation, orders: Sequence[float] | Floats
) -> Floats:
    """Returns the Renyi divergence bound of an event at each order, for the ledger's filter.

    Args:
      event: the event.
      relation: neighbouring relation of the event.
      orders: Renyi orders above 1, `[orders]`.

    Returns:
      `[orders]` bounds, infinite without privacy.

    Raises:
      UnsupportedAccounting: RDP is not valid for the pair.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    if not np.all(alphas > 1):
        raise ValueError(f"Renyi orders must be above 1, got {alphas.min():g}; drop that order")
    if not supports(event, relation, "rdp"):
        raise _unsupported(event, relation, "rdp")
    return _rdp_walk(event, relation, alphas)


class _Curve:
    """The privacy curve of one event under one accountant."""

    def __init__(
        self,
        event: dpe.DpEvent,
        relation: NeighboringRelation,
        accountant: AccountantName,
        *,
        quick: bool = False,
    ):
        library_version()
        choices: tuple[Literal["pld", "rdp"], ...] = (
            ("pld", "rdp") if accountant == "auto" else (accountant,)
        )
        valid = [name for name in choices if supports(event, relation, name)]
        if not valid:
            raise _unsupported(event, relation, accountant)
        self.accountant = valid[0]
        if self.accountant == "pld" and quick:
            self._get = functools.partial(quick_epsilon, event, relation)
        elif self.accountant == "pld":
            self._get = pld_of(event, relation).get_epsilon
        else:
            values = _rdp_walk(event, relation, RDP_ORDERS)
            self._get = functools.partial(_renyi_epsilon, values)

    def epsilon(self, delta: float, runs: int) -> float:
        epsilon = with_sampler_share(self._get, delta, runs)
        if math.isnan(epsilon):
            raise UnsupportedAccounting(
                f"the {self.accountant} accountant returned NaN at delta={delta:g}; raise delta or "
                "lower the number of rounds"
            )
        return epsilon


def _renyi_epsilon(values: Floats, delta: float) -> float:
    orders = cast("Sequence[float]", RDP_ORDERS)
    return float(_rdp.compute_epsilon(orders, cast("Sequence[float]", values), delta)[0])


@contextlib.contextmanager
def _without_convergence_warnings() -> Generator[None]:
    """Silences the convergence warning of an order: it counts as infinite, which is safe."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _unsupported(
    event: dpe.DpEvent, relation: NeighboringRelation, accountant: str
) -> UnsupportedAccounting:
    wanted = "any accountant" if accountant == "auto" else f"the {accountant.upper()} accountant"
    return UnsupportedAccounting(
        f"{event} under {relation.name} is not covered by {wanted}; see the table in "
        "docs/privacy/accounting.md for the pairs that are"
    )


def _is_gaussian_composition(event: dpe.DpEvent) -> bool:
    if isinstance(event, dpe.SelfComposedDpEvent):
        return _is_gaussian_composition(event.event)
    if isinstance(event, dpe.ComposedDpEvent):
        return all(_is_gaussian_composition(inner) for inner in event.events)
    return isinstance(event, dpe.GaussianDpEvent)


def supports(event: dpe.DpEvent, relation: NeighboringRelation, accountant: str) -> bool:  # noqa: PLR0911
    """Implements the dispatch table."""
    is_pld = accountant == "pld"
    match event:
        case dpe.NoOpDpEvent() | dpe.NonPrivateDpEvent():
            return True
        case dpe.SelfComposedDpEvent():
            return supports(event.event, relation, accountant)
        case dpe.ComposedDpEvent():
            return all(supports(inner, relation, accountant) for inner in event.events)
        case dpe.GaussianDpEvent():
            return is_pld or relation is not _ONE
        case dpe.PoissonSampledDpEvent():
            if isinstance(event.event, dpe.GaussianDpEvent):
                return relation in (_ADD, _ONE)
            return not is_pld and relation is _ADD and _is_gaussian_composition(event.event)
        case dpe.SampledWithoutReplacementDpEvent():
            return not is_pld and relation is _ONE and isinstance(event.event, dpe.GaussianDpEvent)
        case dpe.SingleEpochTreeAggregationDpEvent():
            return not is_pld and relation is _SPECIAL
        case dpe.MixtureOfGaussiansDpEvent():
            return is_pld and relation in (_ADD, _SPECIAL)
        case dpe.ZCDpEvent():
            return not is_pld
        case _:
            return False


def _rdp_walk(event: dpe.DpEvent, relation: NeighboringRelation, orders: Floats) -> Floats:
    match event:
        case dpe.SelfComposedDpEvent():
            return event.count * _rdp_walk(event.event, relation, orders)
        case dpe.ComposedDpEvent():
            parts = [_rdp_walk(inner, relation, orders) for inner in event.events]
            return cast("Floats", np.sum(parts, axis=0)) if parts else np.zeros_like(orders)
        case dpe.PoissonSampledDpEvent() if relation is _ONE:
            gaussian = cast("dpe.GaussianDpEvent", event.event)
            return group_pair_rdp(event.sampling_probability, gaussian.noise_multiplier, orders)
        case _:
            accountant = rdp.RdpAccountant(cast("Sequence[float]", orders), relation)
            with _without_convergence_warnings():
                accountant.compose(event)
            return np.asarray(accountant.rdp, dtype=np.float64)


# Renyi divergence of the group-Poisson pair, which no library provides.
#
# Pair (docs/privacy/theorem.md#statement), in units of the clip: (1-q) N(0, s^2) + q N(+1, s^2)
# against the mirror image (1-q) N(0, s^2) + q N(-1, s^2). It is symmetric under x -> -x, so both
# directions agree.


_NO_OVERLAP = 1 / 32
"""Noise multiplier below which the mixture's parts are integrated separately, without overlap."""


def group_pair_rdp(
    sampling_probability: float, noise_multiplier: float, orders: Float64[np.ndarray, " orders"]
) -> Float64[np.ndarray, " orders"]:
    """Returns the Renyi divergence of one round at each order.

    The trapezoid rule on an analytic integrand that vanishes at both ends converges exponentially:
    the nearest singularity is pi * noise_multiplier**2 off the real axis, so the steps below leave
    an error of exp(-4 * pi**2), 1e-17, or less.

    >>> float(group_pair_rdp(1.0, 2.0, np.array([3.0]))[0])  # plain Gaussian, distance 2 clips
    1.5

    Args:
      sampling_probability: probability of each virtual client, in (0, 1].
      noise_multiplier: standard deviation of the noise / clip.
      orders: Renyi orders above 1, `[orders]`.

    Returns:
      `[orders]` divergences.

    Raises:
      ValueError: an argument is out of bounds.
    """
    if not (0 < sampling_probability <= 1 and 0 < noise_multiplier < math.inf):
        raise ValueError(
            f"sampling_probability={sampling_probability} must be in (0, 1], and "
            f"noise_multiplier={noise_multiplier} positive and finite; correct the value"
        )
    values = [_one_order(sampling_probability, noise_multiplier, float(order)) for order in orders]
    return np.array(values, dtype=np.float64)


@functools.lru_cache(maxsize=4096)
def _one_order(q: float, sigma: float, order: float) -> float:
    if q == 1:
        return order * 4 / (2 * sigma**2)
    odds = math.log1p(-q) - math.log(q)
    if sigma < _NO_OVERLAP and sigma**2 * abs(odds) < 1 / 16:
        # A Gaussian of width sigma around 0, where neither data set moved, and one around `order`;
        # # the neglected part is below exp(-64) of it. Quadrature would take gigabytes here.
        moved = -order * odds + order * (order - 1) / (2 * sigma**2)
        return max(0.0, (math.log1p(-q) + float(np.logaddexp(0.0, moved))) / (order - 1))
    # The integrand p^order * r^(1-order) peaks between -1 and 2 * order - 1 and falls off like a
    # Gaussian of width sigma on both sides; 14 widths leave 1e-43 of the mass.
    step = min(sigma / 8, sigma**2 / 2)
    x = np.arange(-1 - 14 * sigma, 2 * order - 1 + 14 * sigma + step, step)
    # Everything relative to N(0, s^2), whose log-density is added at the end.
    up = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    down = np.logaddexp(math.log1p(-q), math.log(q) + (-2 * x - 1) / (2 * sigma**2))
    log_integrand = order * up + (1 - order) * down - x**2 / (2 * sigma**2)
    peak = float(log_integrand.max())
    total = float(np.exp(log_integrand - peak).sum()) * step
    log_moment = peak + math.log(total) - math.log(sigma * math.sqrt(2 * math.pi))
    return max(0.0, log_moment / (order - 1))
