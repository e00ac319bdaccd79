"""Budget of a policy per user block, from its ledger, with a forecast over schedules.

Epsilons of several charges do not add up, so each part of a block is the increase of the
cumulative epsilon: first committed runs, then open reservations, then external charges. The parts
of a block therefore add up to its cumulative epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.foundation.canonical_json import JsonFields, ToJson
from fedemb.ledger import Charge, Ledger
from fedemb.ledger.budget import spent
from fedemb.ledger.state import Attempt
from fedemb.steps.watch_budget.forecast import Due, Forecast, forecast

_SHOWN = {"name", "blocks", "declared", "reason"}
"""Fields of an external charge in the view."""


@dataclass(frozen=True)
class BlockBudget:
    """Budget of one user block. All epsilons at the delta of the policy; infinite if unbounded."""

    block: str
    spent: float
    """Epsilon of the committed runs."""
    reserved: float
    """Increase by runs that reserved and are not committed."""
    external: float
    """Increase by external charges."""
    total: float
    """Cumulative epsilon of all charges."""
    remaining: float
    """Cap less `total`; negative above the cap."""
    runs: int
    """Number of committed runs."""
    reservations: int
    """Number of open reservations."""
    external_charges: int
    planned_runs_left: int | None
    """Runs that the planned series still holds; None: the policy admits other runs."""
    forecast: Forecast | None
    """None: no schedules were given, or no schedule charges the block."""

    def to_json(self) -> JsonFields:
        """Returns the fields as JSON; null is an infinite epsilon."""
        fields: JsonFields = {
            **vars(self),
            "forecast": self.forecast and self.forecast.to_json(),
        }
        return {name: _finite(value) for name, value in fields.items()}


@dataclass(frozen=True)
class BudgetView:
    """Budget of one policy."""

    policy_id: str
    unit: str
    cap: float
    delta: float
    sequence: int
    """Number of the newest ledger record."""
    sha: str
    time: datetime
    """Time of the view; the forecast starts here."""
    blocks: Sequence[BlockBudget]
    """Fullest block first."""
    charges: Sequence[JsonFields]
    """External charges: name, blocks, declared form, reason, actor and record number."""
    open_runs: Sequence[tuple[str, str, str]]
    """Run id, status and time of each open reservation."""
    schedules: Sequence[str]
    """Names of the schedules in the forecast."""
    problems: Sequence[str]
    """Why a schedule is not in the forecast."""

    @property
    def first_reached(self) -> BlockBudget | None:
        """The block whose forecast reaches the cap first; None: no forecast reaches it."""
        reached = [row for row in self.blocks if row.forecast and row.forecast.reached]
        return min(reached, key=_when, default=None)

    def to_json(self) -> JsonFields:
        """Returns the view as JSON."""
        return {
            "policy_id": self.policy_id,
            "unit": self.unit,
            "epsilon_cap": self.cap,
            "delta": self.delta,
            "ledger": {"sequence": self.sequence, "sha": self.sha},
            "time": self.time.isoformat(timespec="seconds"),
            "blocks": [row.to_json() for row in self.blocks],
            "external_charges": list(self.charges),
            "open_reservations": [
                {"run_id": run_id, "status": status, "time": time}
                for run_id, status, time in self.open_runs
            ],
            "schedules": list(self.schedules),
            "problems": list(self.problems),
        }


def budget_view(
    ledger: Ledger,
    now: datetime,
    due: Sequence[Due],
    schedules: Sequence[str],
    problems: Sequence[str],
) -> BudgetView:
    """Returns the budget of a policy at `now`; scheduled runs are in order of time."""
    terms, state = ledger.terms, ledger.state
    names = sorted({*state.by_block, *(block for run in due for block in run.blocks)})
    rows = [_block(ledger, block, [run for run in due if block in run.blocks]) for block in names]
    return BudgetView(
        policy_id=ledger.policy_id,
        unit=terms.unit,
        cap=terms.epsilon_cap,
        delta=terms.delta,
        sequence=ledger.head.sequence,
        sha=ledger.head.sha,
        time=now,
        blocks=sorted(rows, key=lambda row: (row.remaining, row.block)),
        charges=[
            {
                **record.content(ChargeRecord).model_dump(include=_SHOWN),
                "actor": record.actor,
                "sequence": record.sequence,
            }
            for record in state.external
        ],
        open_runs=[
            (attempt.reserve.run_id, attempt.status, attempt.reserve.time)
            for attempt in state.attempts.values()
            if _is_open(attempt)
        ],
        schedules=tuple(schedules),
        problems=tuple(problems),
    )


def _block(ledger: Ledger, block: str, due: Sequence[Due]) -> BlockBudget:
    terms, state = ledger.terms, ledger.state
    attempts = [item for item in state.by_block.get(block, []) if item.charged]
    committed = [item.charge for item in attempts if not _is_open(item)]
    waiting = [item.charge for item in attempts if _is_open(item)]
    external = state.external_charges(block)
    runs = spent(terms, committed).epsilon
    reserved = spent(terms, [*committed, *waiting]).epsilon
    charges: list[Charge] = [*committed, *waiting, *external]
    total = spent(terms, charges).epsilon
    series = terms.series if terms.unplanned_runs == "refuse" else None
    planned = max(0, series.runs - len(attempts)) if series else None
    return BlockBudget(
        block=block,
        spent=runs,
        reserved=reserved - runs,
        external=total - reserved,
        total=total,
        remaining=terms.epsilon_cap - total,
        runs=len(committed),
        reservations=len(waiting),
        external_charges=len(external),
        planned_runs_left=planned,
        forecast=forecast(terms, charges, due) if due else None,
    )


def _is_open(attempt: Attempt) -> bool:
    return attempt.charged and attempt.commit is None


def _when(row: BlockBudget) -> datetime:
    assert row.forecast is not None
    assert row.forecast.reached is not None  # of `first_reached`
    return row.forecast.reached


def _finite(value: ToJson) -> ToJson:
    return None if isinstance(value, float) and not math.isfinite(value) else value
