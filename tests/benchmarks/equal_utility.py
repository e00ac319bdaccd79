"""What each mechanism costs where running sums of updates are equally noisy.

The table of docs/privacy/accounting.md#equal-utility.

    python -m tests.benchmarks.equal_utility      four populations, four mechanisms, two minutes

T = 1000 rounds, delta = n^-1.1; noise as independent noise of multiplier 2 would leave it in the
running sums, in root mean square over rounds. Every cell is priced twice: as the product does, and
with the settings of the published table, found by search and confirmed here to every digit it
prints:

* losses on a grid of 1e-3 (the product's is 1e-4; both are pessimistic, so the finer is the truer),
* as many trees, and participations of a user, as epochs of `users // users_per_round` rounds fit
  in, rounded up: 53 at n = 1e4, where turns of 19.53 rounds give no one more than 52,
* a second BLT buffer only where it lowers the squared error by more than 2 % (the product's default
  is 2 buffers, which is never worse).

A cell fails if the table's figure does not come out at its settings, or if ours is more than 0.5 %
off and none of these, nor the table's two printed digits, explains it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting as dpa
from absl import logging
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from dp_accounting import pld

from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.mechanisms import tree_sensitivity
from fedemb.privacy.mechanisms.blt import Blt
from fedemb.privacy.mechanisms.group_poisson_gaussian import GroupPoissonGaussian
from fedemb.privacy.mechanisms.mechanism import Cohort, MechanismPlan
from fedemb.privacy.mechanisms.round_robin import even_round_robin
from fedemb.privacy.mechanisms.tree_aggregation import TreeAggregation
from fedemb.privacy.mechanisms.user_poisson import UserPoisson
from fedemb.privacy.randomness import toeplitz

BltParameters = tuple[tuple[float, ...], tuple[float, ...]]
"""Decays and scales."""
ROUNDS, NOISE, USERS_PER_CLIENT = 1000, 2.0, 16
TOLERANCE = 0.005
PUBLISHED = {
    10_000: (32, "7.18", "10.47", "48.6", "9.46"),
    100_000: (128, "2.85", "4.29", "13.9", "4.37"),
    1_000_000: (512, "1.19", "1.87", "9.70", "2.35"),
    10_000_000: (2048, "0.505", "0.91", "4.56", "1.46"),
}
"""Users: clients per round, then epsilon of the four mechanisms as the table prints it."""
COARSE_GRID = 1e-3
WORTH_A_BUFFER = 1.02
"""Squared error / squared error with one buffer more, from which the table took that buffer."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of the table."""

    users: int
    mechanism: str
    ours: float
    published: str
    """As the table prints it."""
    at_settings: float
    """Ours with the settings of the table."""
    setting: str
    """What differs, as text; empty where the settings are the same."""

    @property
    def deviation(self) -> float:
        """Of ours from the table's, relative."""
        return self.ours / float(self.published) - 1

    @property
    def reproduced(self) -> bool:
        """Whether the table's settings give the table's figure to its last digit."""
        return _rounds_to(self.at_settings, self.published)

    @property
    def reason(self) -> str:
        """Why ours is more than 0.5 % off; empty where it is not."""
        if abs(self.deviation) <= TOLERANCE:
            return ""
        if _rounds_to(self.ours, self.published):
            return "the table prints so few digits; ours rounds to them"
        return self.setting

    @property
    def ok(self) -> bool:
        """Whether the figure stands, and any gap is explained."""
        return self.reproduced and (abs(self.deviation) <= TOLERANCE or bool(self.reason))


def _rounds_to(value: float, printed: str) -> bool:
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.5 * 10.0**-digits * (1 + 1e-9)


def cells(users: int) -> Iterator[Cell]:
    """The four figures of one population."""
    clients, group, doubled, ftrl, banded = PUBLISHED[users]
    delta = float(users**-1.1)
    cohort = Cohort(
        population=users,
        users_per_client=USERS_PER_CLIENT,
        clients_per_round=clients,
        noise_multiplier=NOISE,
        rounds=ROUNDS,
    )
    base = GroupPoissonGaussian.at(cohort)
    for name, kind, published in (
        ("group-Poisson", GroupPoissonGaussian, group),
        ("user-Poisson 2C", UserPoisson, doubled),
    ):
        plan = kind.at(cohort)
        ours = price(
            plan.event(), plan.relation, delta, runs=0
        ).epsilon  # as the table: ideal noise
        far = abs(ours / float(published) - 1) > TOLERANCE
        yield Cell(
            users=users,
            mechanism=name,
            ours=ours,
            published=published,
            at_settings=on_grid(plan, delta, COARSE_GRID),
            setting=f"grid 1e-3; 1e-5 gives {on_grid(plan, delta, 1e-5):.4f}" if far else "",
        )
    separation, most = even_round_robin(base.virtual_clients, clients, ROUNDS)
    epochs = math.ceil(ROUNDS / separation)
    restarts = {
        "restart_every": separation,
        "matrix_sensitivity": tree_sensitivity.sensitivity(ROUNDS, separation, most, separation),
    }
    tree = TreeAggregation.at(cohort).replaced(**restarts).at_equal_utility(NOISE)
    fewer = f"{epochs} participations, where taking turns gives at most {most}"
    yield Cell(
        users=users,
        mechanism="tree, restarts, RDP, 2C",
        ours=restarted(tree.noise_multiplier, separation, most, delta),
        published=ftrl,
        at_settings=restarted(tree.noise_multiplier, separation, epochs, delta),
        setting=fewer if epochs != most else "",
    )
    two = parameters(separation, most, 2)
    theirs, better = frugal(base, clients, separation, epochs)
    differs = [fewer] if epochs != most else []
    differs += ["1 buffer, where two are better"] if better else []
    yield Cell(
        users=users,
        mechanism="BLT, 2C",
        ours=exact(base, two, clients, separation, most, delta),
        published=banded,
        at_settings=exact(base, theirs, clients, separation, epochs, delta),
        setting="; ".join(differs),
    )


def on_grid(plan: MechanismPlan, delta: float, grid: float) -> float:
    """Epsilon of a sampled mechanism on a grid of losses; pessimistic on any."""
    return pld.PLDAccountant(plan.relation, grid).compose(plan.event()).get_epsilon(delta)


def restarted(noise: float, leaves: int, trees: int, delta: float) -> float:
    """A tree per epoch, each on its own, at twice the clip, as tensorflow-privacy accounts."""
    tree = dpe.SingleEpochTreeAggregationDpEvent(noise / 2, leaves)
    event = dpe.SelfComposedDpEvent(tree, trees)
    return price(event, Relation.REPLACE_SPECIAL, delta, "rdp", runs=0).epsilon


@functools.cache
def parameters(separation: int, most: int, buffers: int) -> BltParameters:
    """BLT noise of least mean error, by jax-privacy."""
    logging.set_verbosity(logging.ERROR)  # It warns where a buffer is left unused.
    return toeplitz.optimise(ROUNDS, separation, most, buffers)


def frugal(
    base: MechanismPlan, clients: int, separation: int, most: int
) -> tuple[BltParameters, bool]:
    """One buffer, or two where they are worth it; and whether two would have been better."""
    one, two = (parameters(separation, most, buffers) for buffers in (1, 2))
    errors = []
    for chosen in (one, two):
        plan = _blt_plan(base, chosen, clients, separation, most)
        errors.append(plan.prefix_variance() * plan.sensitivity_over(ROUNDS) ** 2)
    if errors[0] > WORTH_A_BUFFER * errors[1]:
        return two, False
    return one, errors[0] > 1.001 * errors[1]


def exact(  # noqa: PLR0917 - the numbers of one cell
    base: MechanismPlan,
    chosen: BltParameters,
    clients: int,
    separation: int,
    most: int,
    delta: float,
) -> float:
    """Exact epsilon of one Gaussian mechanism at twice the clip."""
    plan = _blt_plan(base, chosen, clients, separation, most).at_equal_utility(NOISE)
    gaussian = plan.event()
    assert isinstance(gaussian, dpe.GaussianDpEvent)
    return dpa.get_epsilon_gaussian(gaussian.noise_multiplier, delta)


def _blt_plan(
    base: MechanismPlan, chosen: BltParameters, clients: int, separation: int, most: int
) -> Blt:
    column = toeplitz.coefficients(*chosen, ROUNDS)
    return Blt(
        rounds=ROUNDS,
        noise_multiplier=NOISE,
        virtual_clients=base.virtual_clients,
        groupings=1,
        clients_per_round=clients,
        min_separation=separation,
        max_participations=most,
        buffers=len(chosen[0]),
        blt_decay=chosen[0],
        blt_scale=chosen[1],
        matrix_sensitivity=toeplitz.sensitivity(column, separation, most),
    )


def table() -> Iterator[Cell]:
    """All sixteen figures."""
    for users in PUBLISHED:
        yield from cells(users)


def show(rows: Iterator[Cell]) -> bool:
    """Prints cells as they come; returns whether all stand."""
    heads = f"{'ours':>10}{'table':>9}{'off by':>9}{'at its settings':>17}"
    sys.stdout.write(f"{'equal utility, n and mechanism':46}{heads}\n")
    agree = True
    for cell in rows:
        mark = "" if cell.ok else "  NOT EXPLAINED"
        sys.stdout.write(
            f"{f'{cell.users:.0e} {cell.mechanism}':46}{cell.ours:10.4f}{cell.published:>9}"
            f"{cell.deviation:+9.2%}{cell.at_settings:17.4f}{mark}  {cell.reason}\n"
        )
        sys.stdout.flush()
        agree = agree and cell.ok
    return agree


if __name__ == "__main__":
    sys.exit(0 if show(table()) else 1)
