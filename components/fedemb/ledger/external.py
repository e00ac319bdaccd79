"""External charges: privacy loss of a release that was made elsewhere on the same users.

The policy owner declares the loss; the ledger composes it like that of a run and never checks how
the release was made. A loss is declared in one of two forms:

- rho of zero-concentrated differential privacy;
- (epsilon, delta). An (epsilon, delta)-private release is epsilon-private except with probability
  delta (Kairouz, Oh and Viswanath, arXiv 1311.0776). Epsilon-privacy bounds the Renyi divergence at
  order a by epsilon and by a epsilon^2 / 2 (Bun and Steinke, arXiv 1605.02065, prop. 1.4). The
  ledger composes the smaller bound and subtracts delta from the delta of the policy.

External charges are chosen after earlier models are seen, so only the Renyi filter composes them.
"""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import math

from dp_accounting.dp_event import ZCDpEvent

from fedemb.documents.ledger_record import ChargeRecord
from fedemb.errors import Refused
from fedemb.foundation.canonical_json import canonical_json
from fedemb.ledger.budget import Charge, spent
from fedemb.ledger.terms import PolicyTerms
from fedemb.privacy.accounting.events import event_to_json


def external_charge(terms: PolicyTerms, declared: ChargeRecord, sequence: int = -1) -> Charge:
    """Returns the charge of a declared loss.

    Raises:
      Refused: the loss has not exactly one valid form, or the composition or the neighbouring
        relation of the policy does not admit it.
    """
    if terms.composition == "planned" and terms.unplanned_runs != "renyi":
        raise Refused(
            "a planned series cannot compose an external charge, because its runs are fixed in "
            "advance. Start a policy with composition: renyi or unplanned_runs: renyi"
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
    if not (0 < loss < math.inf and 0 <= delta < 1):
        raise Refused(
            f"the declared loss is {loss:g} with delta {delta:g}; pass a positive number, and a "
            "delta in [0, 1)"
        )
    event = ZCDpEvent(rho=loss, xi=0.0)
    if epsilon is not None:
        pure = epsilon < terms.renyi_order * epsilon**2 / 2
        event = ZCDpEvent(rho=0.0 if pure else epsilon**2 / 2, xi=epsilon if pure else 0.0)
    data = canonical_json(event_to_json(event))
    charge = Charge(sequence, "", data, declared.relation, 1, 1, delta=delta, external=True)
    if not math.isfinite(spent(terms, [charge]).epsilon):
        raise Refused(
            "the declared loss has no finite epsilon under this policy, so no sum would. Train no "
            "more on these users, or declare a tighter loss"
        )
    return charge
