"""Decides whether a run may be charged; the only check between a run and private data."""

from __future__ import annotations

from fedemb.errors import BudgetExceeded, LedgerError, PlanMismatch, Refused
from fedemb.ledger.budget import Charge, in_series
from fedemb.ledger.state import LedgerState
from fedemb.ledger.terms import ChargedContent, PolicyTerms


def _unfinished_series(
    state: LedgerState, policy_id: str, blocks: list[str], runs: int
) -> list[str]:
    """Returns the blocks with fewer charges than the planned runs.

    Raises:
      BudgetExceeded: every block has all of them.
    """
    blocks = [block for block in blocks if len(state.charges(block)) < runs]
    if not blocks:
        planned = f"all {runs} planned runs" if runs > 1 else "the one planned run"
        raise BudgetExceeded(
            f"{planned} of policy {policy_id!r} took place, and rounds that were not used "
            "cannot be spent. Start a new policy.policy_id, set policy.planned_runs to all of "
            "its runs, and add up the epsilons of both policies"
        )
    return blocks


def admit(state: LedgerState, policy_id: str, run_id: str, content: ChargedContent) -> list[str]:
    """Returns the requested blocks with enough remaining budget for the run; full blocks drop out.

    A simulation is recorded but not charged, because its model can never be released.

    Args:
      state: current state of the ledger.
      policy_id: policy id, used in error messages.
      run_id: id of the requesting run.
      content: content that the reservation binds.

    Raises:
      BudgetExceeded: no requested block has enough remaining budget.
      PlanMismatch: the policy accepts only runs of its planned series, and this run is not part of
          it, or the series is complete.
      Refused: the run partitions users into blocks differently from earlier runs.
      UnsupportedAccounting: no accountant is valid for the event.
    """
    blocks = list(content["blocks_requested"])
    terms = state.terms
    if terms is None:
        raise LedgerError(f"policy {policy_id!r} has no ledger; make it with `fedemb ledger init`")
    if content["delta"] != terms.delta:
        raise PlanMismatch(
            f"run {run_id!r} has delta={content['delta']:g}, but policy {policy_id!r} is fixed at "
            f"{terms.delta:g}; set policy.delta to that value"
        )
    if not terms.users.cut(blocks):
        raise Refused(
            f"user block {blocks[0]!r} of run {run_id!r} is not a block of policy {policy_id!r}, "
            f"which divides {terms.users.cohort_column or 'one cohort'} into "
            f"{terms.users.blocks_per_cohort} buckets for its lifetime. Restore "
            "partition.blocks_per_cohort and the cohort column"
        )
    if content["purpose"] == "simulation":
        return blocks
    charge = Charge.planned(content, run_id)
    if terms.series is not None and terms.unplanned_runs == "refuse":
        if not in_series(terms, charge):
            raise PlanMismatch(
                f"run {run_id!r} is not of the series that policy {policy_id!r} planned (another "
                "mechanism, rounds or noise); run the planned configuration, or start a policy "
                "with composition: renyi"
            )
        blocks = _unfinished_series(state, policy_id, blocks, terms.series.runs)
    after_charge = {block: state.spent(block, [charge]) for block in blocks}
    # Written so that NaN excludes a block.
    paying = [block for block in blocks if after_charge[block].epsilon <= terms.epsilon_cap]
    if not paying:
        block = min(blocks, key=lambda name: after_charge[name].epsilon)
        before, after = state.spent(block), after_charge[block]
        series = after.method == "planned_series"
        raise BudgetExceeded(
            f"run {run_id!r} would raise block {block!r} from epsilon={before.epsilon:.4g} to "
            f"{after.epsilon:.4g} at delta={terms.delta:g} "
            f"({'as a planned series' if series else 'by the Rényi filter'}), above the cap "
            f"{terms.epsilon_cap:g} of policy {policy_id!r}; {_remedy(terms)}"
        )
    return paying


def _remedy(terms: PolicyTerms) -> str:
    if terms.series is not None and terms.unplanned_runs == "refuse":
        return (
            "no more runs of its series fit: use users of other blocks, or start another "
            "policy_id, with more noise or fewer rounds, and add up the epsilons of both"
        )
    return "raise noise_multiplier, lower rounds, or use users of other blocks"
