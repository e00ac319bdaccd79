"""Prints the privacy columns of the published runs, ours beside theirs.

    python -m tests.benchmarks.poster            all rows, about two minutes
    python -m tests.benchmarks.poster --quick    the poster's three rows and Gboard

DigiFace poster (Xu et al., CVPR 2023): N = 1e7, delta = 1e-7, T = 800, 2048 x 64 users a round. Its
figures for DP-FedAvg and DP-FedEmb are reproduced as published (fixed size, replace-one, RDP,
sensitivity C); for clients that hold several users that is not a valid claim. Beside them stands
what our mechanisms would honestly claim for the same noise. A row fails if it is more than 0.5 %
off and does not round to the digits that were printed.

The last part is the table of docs/privacy/accounting.md#equal-utility: T = 1000 rounds, delta =
n^-1.1, and noise as independent noise of multiplier 2 would leave it in the running sums, in root
mean square over rounds. Its settings were found by search: losses on a grid of 1e-3 (ours is 1e-4;
both are pessimistic, so the finer is the truer), and as many trees and participations of a user as
epochs of `users // users_per_round` rounds fit in, rounded up: 53 at n = 1e4, where turns of 19.53
rounds give no one more than 52. The note says what ours give.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from dp_accounting import pld

from fedemb.privacy import group_mechanisms as tree_sensitivity
from fedemb.privacy.accounting import price
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian, TreeAggregation
from studies.shared import Cohort, at_equal_utility

POPULATION, DELTA, ROUNDS, USERS = 10_000_000, 1e-7, 800, 2048 * 64
TOLERANCE = 0.005
UTILITY_ROUNDS, UTILITY_NOISE, COARSE_GRID = 1000, 2.0, 1e-3
PUBLISHED = {
    10_000: (32, "7.18", "10.47", "48.6"),
    100_000: (128, "2.85", "4.29", "13.9"),
    1_000_000: (512, "1.19", "1.87", "9.70"),
    10_000_000: (2048, "0.505", "0.91", "4.56"),
}
"""Users: clients per round, then epsilon of the three mechanisms as the table prints it."""
INVALID = "as published, not a valid claim for grouped clients"


class Row(NamedTuple):
    """One figure."""

    name: str
    ours: float
    published: str
    """As it is printed."""
    note: str = ""

    @property
    def ok(self) -> bool:
        half_a_digit = 0.5 * 10.0 ** -len(self.published.partition(".")[2]) * (1 + 1e-9)
        off = abs(self.ours - float(self.published))
        return off <= max(TOLERANCE * float(self.published), half_a_digit)


def _epsilon(event: dpe.DpEvent, relation: Relation, delta: float, accountant="auto") -> float:
    # Published figures are of ideal noise.
    return price(event, relation, delta, accountant, runs=0).epsilon


def as_published(noise: float) -> float:
    """Fixed size without replacement, replace-one, RDP, sensitivity C."""
    sampled = dpe.SampledWithoutReplacementDpEvent(POPULATION, USERS, dpe.GaussianDpEvent(noise))
    return _epsilon(dpe.SelfComposedDpEvent(sampled, ROUNDS), Relation.REPLACE_ONE, DELTA, "rdp")


def honest(noise: float) -> tuple[float, float]:
    """Group-Poisson, and users grouped after sampling (2C), for the same noise."""
    plan = GroupPoissonGaussian(
        rounds=ROUNDS,
        l2_norm_clip=1.0,
        noise_multiplier=noise,
        virtual_clients=POPULATION // 64,
        groupings=1,
        sampling_probability=USERS / POPULATION,
    )
    group = _epsilon(plan.event(), plan.relation, DELTA)
    return group, _epsilon(plan.conservative_event(), Relation.ADD_OR_REMOVE_ONE, DELTA)


def tree_rows() -> Iterator[Row]:
    """DP-FTRL of the poster and the Gboard run."""
    noise, squared = 0.26 * 64, tree_sensitivity.sensitivity(ROUNDS, 77, 11) ** 2
    rho = 4 * squared / (2 * noise**2)
    renyi = _epsilon(dpe.ZCDpEvent(rho), Relation.ADD_OR_REMOVE_ONE, DELTA, "rdp")
    gaussian = dpe.GaussianDpEvent(noise / (2 * squared**0.5))
    yield Row("DP-FTRL 0.26 x 64: zCDP", rho, "1.28")
    yield Row("DP-FTRL 0.26 x 64: epsilon, RDP", renyi, "9.67")
    exact = _epsilon(gaussian, Relation.ADD_OR_REMOVE_ONE, DELTA)
    yield Row("DP-FTRL 0.26 x 64: epsilon, exact Gaussian", exact, "9.15", note="ours, honest")
    gboard = tree_sensitivity.sensitivity(2000, 314, 6) ** 2 / (2 * 7**2)
    yield Row("Gboard z = 7, T = 2000: zCDP", gboard, "0.81")


def poster_rows() -> Iterator[Row]:
    """The three rows of the poster, and what is honest."""
    for name, noise, published, group, doubled in (
        ("DP-FedAvg 0.015 x 64", 0.96, "5.62", "4.53", "22.4"),
        ("DP-FedEmb 0.02 x 64", 1.28, "3.90", "3.03", "9.42"),
    ):
        yield Row(f"{name}: fixed size, RDP, C", as_published(noise), published, note=INVALID)
        ours, twice = honest(noise)
        yield Row(f"{name}: group-Poisson, PLD", ours, group, note="ours, honest")
        yield Row(f"{name}: users then groups, PLD, 2C", twice, doubled, note="honest")
    yield from tree_rows()


def utility_rows(users: int) -> Iterator[Row]:
    """Three mechanisms whose running sums are equally noisy, with the settings of the table."""
    clients, group, doubled, ftrl = PUBLISHED[users]
    delta = float(users**-1.1)
    cohort = Cohort(
        population=users,
        users_per_client=16,
        clients_per_round=clients,
        noise_multiplier=UTILITY_NOISE,
        rounds=UTILITY_ROUNDS,
    )
    base = cohort.plan(GroupPoissonGaussian)
    for name, event, relation, published in (
        ("group-Poisson", base.event(), base.relation, group),
        ("user-Poisson 2C", base.conservative_event(), Relation.ADD_OR_REMOVE_ONE, doubled),
    ):
        coarse = pld.PLDAccountant(relation, COARSE_GRID).compose(event).get_epsilon(delta)
        ours = f"ours {_epsilon(event, relation, delta):.4f}"
        yield Row(f"{users:.0e} {name}", coarse, published, note=ours)
    tree = cohort.plan(TreeAggregation)
    separation = tree.min_separation
    noise = at_equal_utility(tree.replaced(restart_every=separation), UTILITY_NOISE)
    leaf = dpe.SingleEpochTreeAggregationDpEvent(noise.noise_multiplier / 2, separation)

    def restarted(trees: int) -> float:
        """A tree per epoch, each on its own, at twice the clip, as tensorflow-privacy accounts."""
        event = dpe.SelfComposedDpEvent(leaf, trees)
        return _epsilon(event, Relation.REPLACE_SPECIAL, delta, "rdp")

    theirs, ours = math.ceil(UTILITY_ROUNDS / separation), tree.max_participations
    note = f"ours {restarted(ours):.4f} of {ours} participations"
    yield Row(f"{users:.0e} tree, restarts, RDP, 2C", restarted(theirs), ftrl, note=note)


def main(arguments: list[str]) -> int:
    """Prints the table; 1 if a row is off."""
    sys.stdout.write(f"{'':46}{'ours':>10}{'published':>10}\n")
    parts = [poster_rows(), *map(utility_rows, () if "--quick" in arguments else PUBLISHED)]
    agree = True
    for row in chain(*parts):
        mark = "ok" if row.ok else f"OFF BY {row.ours / float(row.published) - 1:+.2%}"
        sys.stdout.write(f"{row.name:46}{row.ours:10.4f}{row.published:>10}  {mark}  {row.note}\n")
        sys.stdout.flush()
        agree = agree and row.ok
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
