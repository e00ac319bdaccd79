"""How the price of a block grew: points for charts and tables."""

from __future__ import annotations

from dataclasses import dataclass

from fedemb.ledger.budget import spent
from fedemb.ledger.view import LedgerView

POINTS = 30
"""Points of a history at most; a planned series is priced by PLD, so there are fewer."""
PLANNED_POINTS = 8


@dataclass(frozen=True)
class Point:
    """The cumulative price of a block after a record."""

    sequence: int
    time: str
    run_id: str
    kind: str
    epsilon: float


def worst_block(ledger: LedgerView, blocks: tuple[str, ...] = ()) -> str | None:
    """The block with the highest cumulative epsilon, of those named or of all."""
    names = [block for block in ledger.state.by_block if not blocks or block in blocks]
    return max(names, key=lambda block: ledger.spent(block).epsilon, default=None)


def history(ledger: LedgerView, block: str, last: int | None = None) -> list[Point]:
    """Prices a block after the records that changed it, evenly thinned, the last always kept.

    Args:
      ledger: the ledger, refreshed.
      block: user block.
      last: last record taken into account; None takes all.
    """
    attempts = ledger.state.by_block.get(block, [])
    touching = sorted(
        record.sequence
        for attempt in attempts
        for record in (attempt.reserve, attempt.commit, attempt.void)
        if record is not None and (last is None or record.sequence <= last)
    )
    most = PLANNED_POINTS if ledger.terms.composition == "planned" else POINTS
    step = max(1, -(-len(touching) // most))
    points = list[Point]()
    for sequence in touching[::-1][::step][::-1]:
        record = ledger.chain.records[sequence]
        weights = (attempt.charge_after(sequence) for attempt in attempts)
        epsilon = spent(ledger.terms, [weight for weight in weights if weight]).epsilon
        points.append(Point(sequence, record.time, record.run_id, record.kind, epsilon))
    return points
