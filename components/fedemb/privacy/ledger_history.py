"""How the price of a block grew: points for charts and tables."""

from __future__ import annotations

from dataclasses import dataclass

from components.fedemb.privacy.ledger_records import Record
from components.fedemb.privacy.ledger_state import LedgerState
from components.fedemb.privacy.ledger_view import LedgerView

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
    records = ledger.chain.records[: None if last is None else last + 1]
    touching = [
        record.sequence
        for record in records
        if block in _blocks(record, records) and record.kind in ("reserve", "commit", "void")
    ]
    most = PLANNED_POINTS if ledger.terms.composition == "planned" else POINTS
    step = max(1, -(-len(touching) // most))
    chosen = set(touching[::-1][::step])
    state, points, done = LedgerState(), list[Point](), 0
    for sequence in sorted(chosen):
        state.replay(records[done : sequence + 1], None)
        done = sequence + 1
        record = records[sequence]
        epsilon = state.spent(block).epsilon
        points.append(Point(sequence, record.time, record.run_id, record.kind, epsilon))
    return points


def _blocks(record: Record, records: list[Record]) -> list[str]:
    """Blocks of the reservation a record is about."""
    number: int = record.body.get("reservation", record.sequence)
    blocks: list[str] = records[number].body.get("blocks", [])
    return blocks
