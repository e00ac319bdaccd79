"""External charges: privacy loss of a release that was made elsewhere on the same users.

The policy owner declares the loss; the ledger composes it like that of a run and never checks how
the release was made. A loss is declared in one of three forms:

- an event of `privacy.accounting.events`;
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
from typing import Literal

from dp_accounting.dp_event import ZCDpEvent
from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.errors import FedEmbError, InputError, Refused
from fedemb.foundation.canonical_json import JsonObject
from fedemb.ledger.budget import Charge, DeclaredCharge, external_charge, spent
from fedemb.ledger.terms import PolicyTerms
from fedemb.privacy.accounting.events import event_from_json, event_to_json

Relation = Literal["ADD_OR_REMOVE_ONE", "REPLACE_ONE"]


def declared_loss(
    order: float,
    *,
    event: JsonObject | None = None,
    epsilon: float | None = None,
    delta: float = 0.0,
    rho: float | None = None,
) -> tuple[JsonObject, float]:
    """Returns the event and the delta that the ledger composes, from one declared form.

    Args:
      order: Renyi order of the policy.
      event: event as JSON.
      epsilon: epsilon above 0.
      delta: delta of `epsilon`, in [0, 1).
      rho: rho above 0.

    Raises:
      InputError: not exactly one form, or a number out of bounds.
      ArtifactError: the event is not a known event.
    """
    if sum(form is not None for form in (event, epsilon, rho)) != 1:
        raise InputError("declare the loss once: pass --event, --epsilon or --rho")
    if not 0 <= delta < 1 or (delta and epsilon is None):
        raise InputError(f"--delta is {delta:g}; pass a value in [0, 1), and only with --epsilon")
    if event is not None:
        return event_to_json(event_from_json(event)), 0.0
    value = epsilon if epsilon is not None else rho
    if value is None or not (0 < value < math.inf):
        raise InputError(f"the declared loss is {value}; pass a positive number")
    if epsilon is None:
        return event_to_json(ZCDpEvent(rho=value, xi=0.0)), 0.0
    if epsilon < order * epsilon**2 / 2:
        return event_to_json(ZCDpEvent(rho=0.0, xi=epsilon)), delta
    return event_to_json(ZCDpEvent(rho=epsilon**2 / 2, xi=0.0)), delta


def check_external(terms: PolicyTerms, body: DeclaredCharge, sequence: int = -1) -> Charge:
    """Returns the charge of a declared loss.

    Raises:
      Refused: the composition, the unit or the relation of the policy does not admit the charge.
    """
    if terms.composition == "planned" and terms.unplanned_runs != "renyi":
        raise Refused(
            "a planned series cannot compose an external charge, because its runs are fixed in "
            "advance. Start a policy with composition: renyi or unplanned_runs: renyi"
        )
    if body["unit"] != terms.unit:
        raise Refused(
            f"the charge protects one {body['unit']}, and the policy protects one {terms.unit}. "
            f"Pass the loss of one {terms.unit}"
        )
    if terms.covers_change_own_data and body["relation"] != "REPLACE_ONE":
        raise Refused(
            "the policy also covers users who change their data, and the charge does not. Pass "
            "the loss for a changed user with --relation REPLACE_ONE"
        )
    if body["relation"] not in ("ADD_OR_REMOVE_ONE", "REPLACE_ONE"):
        raise Refused(
            f"relation {body['relation']!r} is not ADD_OR_REMOVE_ONE or REPLACE_ONE. Pass one of "
            "them with --relation"
        )
    if not terms.users.cut(body["blocks"]):
        raise Refused(
            f"block {body['blocks'][0]!r} is not a user block of the policy. Run `fedemb "
            "ledger show` to list the blocks"
        )
    charge = external_charge(body, sequence)
    try:
        NeighboringRelation[charge.relation]
        epsilon = spent(terms, [charge]).epsilon
    except (FedEmbError, ValueError) as error:
        raise Refused(
            f"the policy cannot compose this charge ({error}). Pass another --event, "
            "or --epsilon or --rho"
        ) from error
    if not math.isfinite(epsilon):
        raise Refused(
            "the declared loss has no finite epsilon under this policy, so no sum would. Train no "
            "more on these users, or declare a tighter loss"
        )
    return charge
