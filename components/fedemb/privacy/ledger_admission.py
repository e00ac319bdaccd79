"""May this run be charged? The one decision that stands between a run and private data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from components.fedemb.artifacts import canonical_json
from components.fedemb.config import ONE_COHORT
from components.fedemb.errors import BudgetExceeded, LedgerError, PlanMismatch, Refused
from components.fedemb.privacy.ledger_budget import Charge, on_schedule
from components.fedemb.privacy.ledger_state import LedgerState


def admit(state: LedgerState, policy_id: str, run_id: str, content: Mapping[str, Any]) -> list[str]:
    """Returns the requested blocks that can pay for the run; full ones drop out.

    A simulation is written down but pays nothing: it can never be released.

    Args:
      state: the ledger as of now.
      policy_id: for the message.
      run_id: run that asks.
      content: what the reservation binds.

    Raises:
      BudgetExceeded: no requested block can pay.
      PlanMismatch: the policy takes only runs of its planned series, and this is none, or the
        series is complete.
      Refused: its blocks cut the users otherwise than those of earlier runs.
      UnsupportedAccounting: no accountant is valid for the event.
    """
    blocks: list[str] = list(content["blocks_requested"])
    terms = state.terms
    if terms is None:
        raise LedgerError(f"policy {policy_id!r} has no ledger; make it with `fedemb ledger init`")
    if content["delta"] != terms.delta:
        raise PlanMismatch(
            f"run {run_id!r} has delta={content['delta']:g}, policy {policy_id!r} "
            f"{terms.delta:g} for life; set policy.delta to it"
        )
    if content["purpose"] == "simulation":
        return blocks
    _check_cut(state, policy_id, blocks)
    charge = Charge(
        sequence=-1,
        run_id=run_id,
        event=canonical_json(content["event"]),
        relation=content["relation"],
        rounds=content["rounds"],
        rounds_charged=content["rounds"],
    )
    if terms.schedule is not None and terms.off_schedule == "refuse":
        if not on_schedule(terms, charge):
            raise PlanMismatch(
                f"run {run_id!r} is not of the series that policy {policy_id!r} planned (another "
                "mechanism, rounds or noise); run the planned configuration, or start a policy "
                "with composition: renyi"
            )
        if any(len(state.charges(block)) >= terms.schedule.runs for block in blocks):
            raise BudgetExceeded(
                f"the series of {terms.schedule.runs} runs that policy {policy_id!r} planned is "
                "complete; rounds given back are not spent again, start another policy"
            )
    trials = {block: state.spent(block, [charge]) for block in blocks}
    # Written so that NaN drops a block out.
    paying = [block for block in blocks if trials[block].epsilon <= terms.epsilon_cap]
    if not paying:
        block = min(blocks, key=lambda name: trials[name].epsilon)
        before = state.spent(block)
        raise BudgetExceeded(
            f"run {run_id!r} would bring block {block!r} from epsilon={before.epsilon:.4g} to "
            f"{trials[block].epsilon:.4g} at delta={terms.delta:g} ({trials[block].method}), above "
            f"the cap {terms.epsilon_cap:g} of policy {policy_id!r}; raise noise_multiplier, lower "
            "rounds, or use users of other blocks"
        )
    return paying


def _check_cut(state: LedgerState, policy_id: str, blocks: Iterable[str]) -> None:
    """Refuses blocks by which a user would move to another block, with an empty account.

    Buckets are a hash modulo their number, and without a cohort column all users are in one cohort.
    """
    charged = (item.reserve.body for item in state.attempts.values() if item.charged)
    first = next(charged, None)
    if first is not None and _cut(blocks) != _cut(first["blocks_requested"]):
        raise Refused(
            f"policy {policy_id!r} cut its users into the buckets and cohorts of "
            f"{', '.join(first['blocks_requested'][:3])}, ... for life, and this run cuts them "
            "otherwise, so that spent budget would be lost from sight; keep "
            "partition.blocks_per_cohort and the cohort column as they were"
        )


def _cut(blocks: Iterable[str]) -> tuple[set[str], set[bool]]:
    """Buckets of a cohort, and whether users have no cohorts."""
    parts = [block.rpartition("/") for block in blocks]
    return {bucket for _, _, bucket in parts}, {cohort == ONE_COHORT for cohort, _, _ in parts}
