"""Composes the privacy loss of all runs that used a user block.

The policy fixes one of two composition methods when it is created:

- `planned`: the policy commits a series of identical runs in advance, and PLD composes the runs
  that were reserved. All parameters are fixed before the first output, so ordinary composition
  holds.
- `renyi`: later runs are chosen after earlier models are seen. The sum of the runs' Renyi
  divergences at one order, fixed in advance, stays below the value that converts to the cap
  (Feldman and Zrnic 2021, Renyi filters; docs/privacy/accounting.md#over-several-runs). Selecting
  the best order afterwards, or a PLD filter, would not be valid.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

from dp_accounting.dp_event import DpEvent, NoOpDpEvent, SelfComposedDpEvent, ZCDpEvent
from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.errors import LedgerError, Refused
from fedemb.foundation.canonical_json import canonical_json, sha256_hex
from fedemb.ledger.terms import ChargedContent, PolicyTerms
from fedemb.privacy.guarantee import event_to_json, with_sampler_share

LEAST_DELTA = 2.0**-49
"""Least delta per charge, above the share of a noise sampler; below it no epsilon is certified."""


@dataclass(frozen=True)
class Charge:
    """The privacy cost of one reservation for a block."""

    event: bytes
    """Event of the whole run as reserved, canonical JSON."""
    relation: str
    rounds: int
    """Rounds reserved."""
    rounds_charged: int
    """Rounds started if the run is committed, otherwise rounds reserved."""
    delta: float = 0.0
    """Declared failure probability of an external charge, subtracted from the policy's delta."""
    external: bool = False
    """Whether the policy owner declared the charge for a release made elsewhere."""

    @classmethod
    def planned(cls, content: ChargedContent) -> Self:
        """Returns the charge of a run that is not in the ledger yet, see `charged_content`."""
        rounds = content["rounds"]
        event = canonical_json(content["event"])
        return cls(event, content["relation"], rounds, rounds)

    @property
    def event_sha(self) -> str:
        """SHA-256 digest of the reserved event."""
        return sha256_hex(self.event)


@dataclass(frozen=True)
class Spent:
    """The cumulative privacy loss of a block."""

    epsilon: float
    delta: float
    method: Literal["nothing", "planned_series", "renyi_filter"]
    order: float | None
    """Order of the Renyi filter."""
    charges: int
    """Number of runs charged to the block."""


def lowered(event: DpEvent, rounds: int, charged: int) -> DpEvent:
    """Returns the event of the rounds that were started, if the run composes equal rounds.

    A mechanism whose whole run is one event (a tree) stays charged in full.
    """
    if charged >= rounds:
        return event
    if charged == 0:
        return NoOpDpEvent()
    if isinstance(event, SelfComposedDpEvent) and event.count == rounds:
        return SelfComposedDpEvent(event.event, charged)
    return event


def renyi_epsilon(divergence: float, order: float, delta: float) -> float:
    """Returns the epsilon of a Renyi divergence at one order (Canonne et al. 2020, Prop. 12).

    >>> round(renyi_epsilon(1.0, 8.0, 1e-6), 3)
    2.543
    """
    of_delta = (math.log(delta) + math.log(order)) / (order - 1)
    return max(0.0, divergence + math.log1p(-1 / order) - of_delta)


@cache
def _divergence(event: bytes, relation: str, order: float, rounds: int, charged: int) -> float:
    from fedemb.privacy.accounting import rdp_of

    part = lowered(_event(event), rounds, charged)
    value = float(rdp_of(part, NeighboringRelation[relation], [order])[0])
    if not value >= 0:
        raise LedgerError(
            f"the Renyi divergence of a reserved event is {value}, expected a number of at least "
            "0; restore the ledger from its backup"
        )
    return value


@cache
def _series_epsilon(event: bytes, relation: str, runs: int, delta: float) -> float:
    from fedemb.privacy.accounting import price
    from fedemb.privacy.guarantee import repeated

    series = repeated(_event(event), runs)
    return price(series, NeighboringRelation[relation], delta, runs=runs).epsilon


def _event(data: bytes) -> DpEvent:
    from fedemb.privacy.guarantee import event_from_json

    return event_from_json(json.loads(data))


def in_series(terms: PolicyTerms, charge: Charge) -> bool:
    """Returns whether a charge is a run of the series that the policy committed in advance."""
    series = terms.series
    return series is not None and (series.event_sha, series.relation) == (
        charge.event_sha,
        charge.relation,
    )


def spent(terms: PolicyTerms, charges: Sequence[Charge]) -> Spent:
    """Returns the cumulative privacy loss of the runs charged to one block.

    Raises:
      LedgerError: the policy's composition method does not support a charge.
      UnsupportedAccounting: an event without a valid accountant.
    """
    if not charges:
        return Spent(0.0, terms.delta, "nothing", None, 0)
    delta = terms.delta
    if terms.series is not None:
        planned = all(in_series(terms, item) and not item.external for item in charges)
        if not planned or len(charges) > terms.series.runs:
            raise LedgerError(
                "the ledger has a run outside the planned series, which the policy refuses; "
                "restore the ledger from its backup"
            )
        # Unused rounds are not reused here: the series is priced as planned.
        first = charges[0]
        epsilon = _series_epsilon(first.event, first.relation, len(charges), delta)
        return Spent(epsilon, delta, "planned_series", None, len(charges))
    divergence = math.fsum(
        _divergence(one.event, one.relation, terms.renyi_order, one.rounds, one.rounds_charged)
        for one in charges
    )
    order = terms.renyi_order
    external = any(item.external for item in charges)
    left = delta - math.fsum(item.delta for item in charges)
    if external and not left > len(charges) * LEAST_DELTA:
        # Declared losses were spent elsewhere and are recorded even without any delta left.
        return Spent(math.inf, terms.delta, "renyi_filter", order, len(charges))
    try:
        epsilon = with_sampler_share(
            lambda share: renyi_epsilon(divergence, order, share), left, len(charges)
        )
    except ValueError as error:
        raise LedgerError(
            f"{len(charges)} runs leave nothing of delta={delta:g} after the share of their noise "
            "samplers; start another policy"
        ) from error
    return Spent(epsilon, terms.delta, "renyi_filter", order, len(charges))


LARGEST_LOSS = 1e9
"""Bound on a declared epsilon or rho, far above any that protects: its square is finite."""


def external_charge(terms: PolicyTerms, declared: ChargeRecord) -> Charge:
    """Returns the charge of a declared loss.

    Raises:
      Refused: the loss has not exactly one valid form, or the composition or the neighbouring
        relation of the policy does not admit it.
    """
    if terms.composition == "planned":
        raise Refused(
            "a planned series cannot compose an external charge, because its runs are fixed in "
            "advance. Start a policy with composition: renyi"
        )
    changed = terms.covers_change_own_data
    covered = "REPLACE_ONE" if changed else "ADD_OR_REMOVE_ONE"
    if declared.relation != covered:
        raise Refused(
            f"the policy protects one {terms.unit} that {'changes' if changed else 'is absent'}, "
            f"and a loss for {declared.relation} does not cover that. Pass the loss for {covered} "
            "with --relation"
        )
    if not terms.users.cut(declared.blocks):
        raise Refused(
            f"block {declared.blocks[0]!r} is not a user block of the policy. Run `fedemb "
            "ledger show` to list the blocks"
        )
    epsilon, delta, rho = declared.epsilon, declared.delta, declared.rho
    loss = rho if epsilon is None else epsilon
    if loss is None or None not in (epsilon, rho) or (delta and epsilon is None):
        raise Refused("declare the loss once: pass --epsilon, with --delta if it has one, or --rho")
    if not (0 < loss < LARGEST_LOSS and 0 <= delta < 1):
        raise Refused(
            f"the declared loss is {loss:g} with delta {delta:g}; pass a positive number below "
            f"{LARGEST_LOSS:g}, and a delta in [0, 1)"
        )
    event = ZCDpEvent(rho=loss, xi=0.0)
    if epsilon is not None:
        pure = epsilon < terms.renyi_order * epsilon**2 / 2
        event = ZCDpEvent(rho=0.0 if pure else epsilon**2 / 2, xi=epsilon if pure else 0.0)
    data = canonical_json(event_to_json(event))
    charge = Charge(data, declared.relation, 1, 1, delta=delta, external=True)
    if not math.isfinite(spent(terms, [charge]).epsilon):
        raise Refused(
            "the declared loss has no finite epsilon under this policy, so no sum would. Train no "
            "more on these users, or declare a tighter loss"
        )
    return charge
