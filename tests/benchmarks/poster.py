"""Prints the privacy columns of the published runs, ours beside theirs.

    python -m tests.benchmarks.poster            the table, about two minutes
    python -m tests.benchmarks.poster --quick    the poster's three rows and Gboard

DigiFace poster (Xu et al., CVPR 2023): N = 1e7, delta = 1e-7, T = 800, 2048 x 64 users a round. Its
figures for DP-FedAvg and DP-FedEmb are reproduced as published (fixed size, replace-one, RDP,
sensitivity C); for clients that hold several users that is not a valid claim. Beside them stands
what our mechanisms would honestly claim for the same noise. A row fails if it is more than 0.5 %
off. The last part is the table of equal utility of docs/privacy/accounting.md#equal-utility, see
`equal_utility`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe

from fedemb.privacy import group_mechanisms as tree_sensitivity
from fedemb.privacy.accounting import price
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
from tests.benchmarks import equal_utility

POPULATION, DELTA, ROUNDS, USERS = 10_000_000, 1e-7, 800, 2048 * 64
TOLERANCE = 0.005
INVALID = "as published, not a valid claim for grouped clients"


class Row(NamedTuple):
    """One figure."""

    name: str
    ours: float
    published: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return abs(self.ours - self.published) <= TOLERANCE * self.published


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
    yield Row("DP-FTRL 0.26 x 64: zCDP", rho, 1.28)
    yield Row("DP-FTRL 0.26 x 64: epsilon, RDP", renyi, 9.67)
    exact = _epsilon(gaussian, Relation.ADD_OR_REMOVE_ONE, DELTA)
    yield Row("DP-FTRL 0.26 x 64: epsilon, exact Gaussian", exact, 9.15, note="ours, honest")
    gboard = tree_sensitivity.sensitivity(2000, 314, 6) ** 2 / (2 * 7**2)
    yield Row("Gboard z = 7, T = 2000: zCDP", gboard, 0.81)


def poster_rows() -> Iterator[Row]:
    """The three rows of the poster, and what is honest."""
    for name, noise, published, group, doubled in (
        ("DP-FedAvg 0.015 x 64", 0.96, 5.62, 4.53, 22.4),
        ("DP-FedEmb 0.02 x 64", 1.28, 3.90, 3.03, 9.42),
    ):
        yield Row(f"{name}: fixed size, RDP, C", as_published(noise), published, note=INVALID)
        ours, twice = honest(noise)
        yield Row(f"{name}: group-Poisson, PLD", ours, group, note="ours, honest")
        yield Row(f"{name}: users then groups, PLD, 2C", twice, doubled, note="honest")
    yield from tree_rows()


def show(rows: Iterator[Row]) -> bool:
    """Prints rows as they come; returns whether all agree."""
    agree = True
    for row in rows:
        mark = "ok" if row.ok else f"OFF BY {row.ours / row.published - 1:+.2%}"
        sys.stdout.write(
            f"{row.name:46}{row.ours:10.4f}{row.published:10.4g}  {mark}  {row.note}\n"
        )
        sys.stdout.flush()
        agree = agree and row.ok
    return agree


def main(arguments: list[str]) -> int:
    """Prints the table; 1 if a row is off."""
    sys.stdout.write(f"{'':46}{'ours':>10}{'published':>10}\n")
    agree = show(poster_rows())
    if "--quick" not in arguments:
        sys.stdout.write("\n")
        agree = equal_utility.show(equal_utility.table()) and agree
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
