"""Privacy cost of a schedule before it is applied, computed as the ledger will charge its runs.

The ledger refuses a run that passes the cap together with runs of other schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedemb.config import RunConfig
from fedemb.errors import BudgetExceeded, ConfigError, LedgerError
from fedemb.ledger import charged_content, series_of, terms_of
from fedemb.ledger.budget import Charge, Spent, spent
from fedemb.ledger.terms import PolicyTerms
from fedemb.pipelines.schedules.schedule import Schedule
from fedemb.privacy.mechanisms.registry import plan_mechanism


@dataclass(frozen=True)
class Cost:
    """Cost of a schedule for a user who is in every run."""

    runs: int
    epsilon_one: float
    """Epsilon of one run."""
    epsilon: float
    """Epsilon of all of them."""
    delta: float
    method: str
    """How the runs were composed."""

    def __str__(self) -> str:
        """The sentence of a dry run."""
        return (
            f"{self.runs} runs, at most epsilon={self.epsilon:.3f} at delta={self.delta:g} for one "
            f"user in all of them ({self.method}; one run: {self.epsilon_one:.3f})"
        )


def cost_of(schedule: Schedule, config: RunConfig) -> Cost:
    """Prices all runs of a schedule exactly as the ledger will, and holds them against both caps.

    Raises:
      BudgetExceeded: they cost more than the schedule's budget or the policy's cap, or are more
        than a planned policy commits; the sentence says after how many runs.
      UnsupportedAccounting: no accountant is valid for the mechanism.
    """
    charge, terms = charge_of(config)
    _ = _check(schedule, charge, terms, schedule.budget.epsilon, "its budget")
    whole = _check(schedule, charge, terms, config.policy.epsilon_cap, "the policy")
    one = spent(terms, [charge])
    return Cost(schedule.runs, one.epsilon, whole.epsilon, whole.delta, whole.method)


def charge_of(config: RunConfig) -> tuple[Charge, PolicyTerms]:
    """One run as the ledger will charge it, and the terms it is charged under.

    Raises:
      ConfigError: the run has no price.
    """
    if not config.mechanism.private:
        raise ConfigError(
            f"mechanism.kind={config.mechanism.kind} has no privacy cost and cannot be "
            "scheduled. Set another mechanism."
        )
    plan = plan_mechanism(config)
    charge = Charge.planned(charged_content(config, plan))
    return charge, terms_of(config, series_of(config, plan))


def _check(schedule: Schedule, charge: Charge, terms: PolicyTerms, cap: float, whose: str) -> Spent:
    """Prices all runs, and refuses with the number of runs that fit."""
    whole = _price(schedule.runs, charge, terms)
    if whole is not None and whole.epsilon <= cap:
        return whole
    fits, passes = 0, schedule.runs
    while passes - fits > 1:
        middle = (fits + passes) // 2
        price = _price(middle, charge, terms)
        if price is not None and price.epsilon <= cap:
            fits = middle
        else:
            passes = middle
    if whole is not None:
        why = f"epsilon={whole.epsilon:.3f} in {schedule.runs} runs, and {whose} allows {cap:.3f}"
    elif terms.series is not None:
        why = f"{schedule.runs} runs, and the policy commits {terms.series.runs} of one plan"
    else:
        why = f"{schedule.runs} runs, which leave nothing of delta={terms.delta:g}"
    raise BudgetExceeded(
        f"schedule {schedule.name} costs {why}; the cap holds for {fits} runs, and run {passes}, "
        f"due {schedule.slots[passes - 1]:%Y-%m-%d %H:%M} UTC, would pass it: end earlier, run "
        "less often, or raise noise_multiplier"
    )


def _price(runs: int, charge: Charge, terms: PolicyTerms) -> Spent | None:
    """The price of so many runs; None: the policy does not hold so many."""
    try:
        return spent(terms, [charge] * runs)
    except LedgerError:
        return None
