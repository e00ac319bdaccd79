"""What each mechanism costs where running sums of updates are equally noisy.

The table of docs/privacy/accounting.md#equal-utility.

    python -m tests.benchmarks.equal_utility      four populations, three mechanisms

T = 1000 rounds, delta = n^-1.1; noise as independent noise of multiplier 2 would leave it in the
running sums, in root mean square over rounds. Every cell is priced twice: as the product does, and
with the settings of the published table, found by search and confirmed here to every digit it
prints:

* losses on a grid of 1e-3 (the product's is 1e-4; both are pessimistic, so the finer is the truer),
* as many trees, and participations of a user, as epochs of `users // users_per_round` rounds fit
  in, rounded up: 53 at n = 1e4, where turns of 19.53 rounds give no one more than 52.

A cell fails if the table's figure does not come out at its settings, or if ours is more than 0.5 %
off and none of these, nor the table's two printed digits, explains it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe
from dp_accounting import pld

from fedemb.privacy.accounting import price
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian, TreeAggregation
from studies.shared import Cohort, at_equal_utility

ROUNDS, NOISE, USERS_PER_CLIENT = 1000, 2.0, 16
TOLERANCE = 0.005
PUBLISHED = {
    10_000: (32, "7.18", "10.47", "48.6"),
    100_000: (128, "2.85", "4.29", "13.9"),
    1_000_000: (512, "1.19", "1.87", "9.70"),
    10_000_000: (2048, "0.505", "0.91", "4.56"),
}
"""Users: clients per round, then epsilon of the three mechanisms as the table prints it."""
COARSE_GRID = 1e-3


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
    """The three figures of one population."""
    clients, group, doubled, ftrl = PUBLISHED[users]
    delta = float(users**-1.1)
    cohort = Cohort(
        population=users,
        users_per_client=USERS_PER_CLIENT,
        clients_per_round=clients,
        noise_multiplier=NOISE,
        rounds=ROUNDS,
    )
    base = cohort.plan(GroupPoissonGaussian)
    for name, event, relation, published in (
        ("group-Poisson", base.event(), base.relation, group),
        ("user-Poisson 2C", base.conservative_event(), Relation.ADD_OR_REMOVE_ONE, doubled),
    ):
        ours = price(event, relation, delta, runs=0).epsilon  # as the table: ideal noise
        fine = on_grid(event, relation, delta, 1e-5)
        far = abs(ours / float(published) - 1) > TOLERANCE
        yield Cell(
            users=users,
            mechanism=name,
            ours=ours,
            published=published,
            at_settings=on_grid(event, relation, delta, COARSE_GRID),
            setting=f"grid 1e-3; 1e-5 gives {fine:.4f}" if far else "",
        )
    tree = cohort.plan(TreeAggregation)
    separation, most = tree.min_separation, tree.max_participations
    epochs = math.ceil(ROUNDS / separation)
    tree = at_equal_utility(tree.replaced(restart_every=separation), NOISE)
    fewer = f"{epochs} participations, where taking turns gives at most {most}"
    yield Cell(
        users=users,
        mechanism="tree, restarts, RDP, 2C",
        ours=restarted(tree.noise_multiplier, separation, most, delta),
        published=ftrl,
        at_settings=restarted(tree.noise_multiplier, separation, epochs, delta),
        setting=fewer if epochs != most else "",
    )


def on_grid(event: dpe.DpEvent, relation: Relation, delta: float, grid: float) -> float:
    """Epsilon of a sampled mechanism on a grid of losses; pessimistic on any."""
    return pld.PLDAccountant(relation, grid).compose(event).get_epsilon(delta)


def restarted(noise: float, leaves: int, trees: int, delta: float) -> float:
    """A tree per epoch, each on its own, at twice the clip, as tensorflow-privacy accounts."""
    tree = dpe.SingleEpochTreeAggregationDpEvent(noise / 2, leaves)
    event = dpe.SelfComposedDpEvent(tree, trees)
    return price(event, Relation.REPLACE_SPECIAL, delta, "rdp", runs=0).epsilon


def table() -> Iterator[Cell]:
    """All twelve figures."""
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
