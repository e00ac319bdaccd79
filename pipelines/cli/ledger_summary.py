"""What `fedemb ledger` says: who spent what, what is left, how many more runs fit, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from fedemb.config import RunConfig
from fedemb.documents.ledger_record import KeysRecord
from fedemb.errors import InputError, LedgerError, Refused
from fedemb.foundation.canonical_json import JsonFields
from fedemb.keys.trust import TrustStore
from fedemb.ledger import (
    Charge,
    Ledger,
    PolicyTerms,
    charged_content,
    policies,
    read_trust,
    series_of,
    terms_of,
)
from fedemb.ledger.budget import spent
from fedemb.ledger.records import Chain
from fedemb.ledger.state import admit
from fedemb.ledger.terms import ChargedContent
from fedemb.privacy.registry import plan_mechanism
from fedemb.storage import Store, open_store

RUNS_SHOWN = 20
MOST_FITTING = 100_000


def load(uri: str, policy_id: str | None, trust: TrustStore | None, *, signatures: bool) -> Ledger:
    """Opens a ledger for reading.

    Args:
      uri: root of the ledgers.
      policy_id: None takes the only policy there.
      trust: pinned keys; None takes the trust file beside the ledger.
      signatures: False checks the last signature and the hash chain only.

    Raises:
      InputError: no policy found, not this one, or several and none was passed.
    """
    store = open_store(uri)
    name = _found_policy(store, policy_id)
    ledger = Ledger(Chain(store, name, trust or read_trust(store)))
    ledger.refresh(signatures=signatures)
    if not ledger.chain.records:
        raise LedgerError(
            f"{store.uri} holds no policy {name!r}; make it with `fedemb ledger init`"
        )
    return ledger


def _found_policy(store: Store, policy_id: str | None) -> str:
    names = policies(store)
    if not names:
        raise InputError(f"No ledger in {store.uri}. Create one with `fedemb ledger init`.")
    if policy_id is not None:
        if policy_id in names:
            return policy_id
        raise InputError(
            f"{store.uri} has no policy {policy_id!r}, only {', '.join(names)}. Pass "
            "--policy-id, or the configuration of that policy."
        )
    if len(names) == 1:
        return names[0]
    raise InputError(f"{store.uri} holds several policies; choose --policy-id {' | '.join(names)}")


def summary(ledger: Ledger) -> JsonFields:
    """Blocks, runs and terms, as JSON."""
    state, terms = ledger.state, ledger.terms
    blocks = {block: state.spent(block) for block in sorted(state.by_block)}
    runs = []
    for attempt in state.attempts.values():
        record, charge = attempt.reserve, attempt.charge
        runs.append(
            {
                "run_id": record.run_id,
                "attempt": record.attempt,
                "purpose": attempt.reserved.purpose,
                "status": attempt.status,
                "rounds_reserved": charge.rounds,
                "rounds_charged": charge.rounds_charged if attempt.charged else 0,
                "blocks": attempt.reserved.blocks,
                "time": record.time,
                "actor": record.actor,
                "sequence": record.sequence,
            }
        )
    return {
        "policy_id": ledger.policy_id,
        "terms": terms.to_json(),
        "head": {"sequence": ledger.head.sequence, "sha": ledger.head.sha},
        "blocks": [
            {
                "block": block,
                "epsilon": spent.epsilon,
                "left": terms.epsilon_cap - spent.epsilon,
                "runs": spent.charges,
                "method": spent.method,
            }
            for block, spent in blocks.items()
        ],
        "runs": runs,
        "evaluations": len(state.evaluations),
        "external": [
            {**record.body, "actor": record.actor, "sequence": record.sequence}
            for record in state.external
        ],
        "approvers": sorted(state.approvers.values()),
        "decisions": [
            {**record.body, "actor": record.actor, "time": record.time}
            for record in state.decisions
        ],
        "rotations": [
            {
                "sequence": record.sequence,
                "roles": [key["role"] for key in record.content(KeysRecord).keys],
                "reason": record.content(KeysRecord).reason,
                "actor": record.actor,
            }
            for record in state.rotations
        ],
    }


def composition(terms: PolicyTerms) -> str:
    """Returns how the runs of a policy add up, as text."""
    if terms.series is None:
        return f"composed by a Rényi filter of order {terms.renyi_order:g}"
    runs = terms.series.runs
    return f"a planned series of {runs} runs" if runs > 1 else "one planned run"


def content_of(config: RunConfig) -> ChargedContent:
    """Returns the budget content that a reservation of this configuration would bind."""
    return charged_content(config, plan_mechanism(config))


def fitting(ledger: Ledger, content: ChargedContent) -> int:
    """How many more runs with this content the worst requested block can pay, 100,000 at most."""
    charge = Charge.planned(content)
    terms, state = ledger.terms, ledger.state
    blocks = content["blocks_requested"]

    def fits(runs: int) -> bool:
        try:
            return all(
                state.spent(block, [charge] * runs).epsilon <= terms.epsilon_cap for block in blocks
            )
        except Refused:
            return False

    if not fits(1):
        return 0
    most = terms.series.runs if terms.series else MOST_FITTING
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def first_run_without_budget(ledger: Ledger, blocks: Sequence[str], more: int) -> datetime | None:
    """Returns when the first run that does not fit is due, if runs continue at their mean interval.

    Args:
      ledger: the ledger of the policy.
      blocks: blocks that the runs request.
      more: number of runs that still fit.

    Returns: None before the second charged run of these blocks.
    """
    times = [
        datetime.fromisoformat(item.reserve.time)
        for item in ledger.state.attempts.values()
        if item.charged and set(item.reserved.blocks) & set(blocks)
    ]
    if len(times) < 2:
        return None
    return times[-1] + (more + 1) * (times[-1] - times[0]) / (len(times) - 1)


def would_admit(
    ledger: Ledger, config: RunConfig, content: ChargedContent
) -> tuple[list[str], str | None]:
    """Blocks a run of this configuration would get, or the sentence it would be refused with."""
    try:
        ledger.check_terms(terms_of(config, ledger.terms.series))
        return admit(ledger.state, ledger.policy_id, "this run", content), None
    except Refused as error:
        return [], str(error).replace("run 'this run'", "such a run")


def planned_series(config: RunConfig) -> tuple[int, float] | None:
    """The runs that a policy of this configuration plans at once, and the epsilon of all of them.

    None: it plans no series.
    """
    terms = terms_of(config, series_of(config, plan_mechanism(config)))
    if terms.series is None:
        return None
    runs = terms.series.runs
    return runs, spent(terms, [Charge.planned(content_of(config))] * runs).epsilon


def admission(ledger: Ledger, config: RunConfig) -> str:
    """Whether a run of this configuration would be admitted now, in a sentence."""
    content = content_of(config)
    blocks, refusal = would_admit(ledger, config, content)
    if refusal:
        return f"refused: {refusal}"
    if content["purpose"] == "simulation":
        return "a simulation: written down, charges nothing, can never be released"
    return f"admitted on {', '.join(blocks)}; {fitting(ledger, content)} such runs fit in all"


def counted(number: int, noun: str) -> str:
    """Returns a number of things with the right plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
