"""Privacy cost of schedules before they are applied, computed as the ledger will charge them.

A policy's cap binds everything that runs under it, so schedules that share a policy are added up
before any of them is applied, block by block: users of other blocks do not pay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from fedemb.config import RunConfig
from fedemb.errors import BudgetExceeded, ConfigError, LedgerError
from fedemb.ledger import blocks_of, charged_content, series_of, terms_of
from fedemb.ledger.budget import Charge, Spent, spent
from fedemb.ledger.terms import PolicyTerms
from fedemb.pipelines.schedules.schedule import Schedule
from fedemb.privacy.mechanisms.registry import plan_mechanism
from fedemb.storage import open_store


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
    who = f"schedule {schedule.name} costs"
    runs = {schedule.name: (schedule, charge)}
    _check(who, runs, terms, schedule.budget.epsilon, "its budget")
    whole = _check(who, runs, terms, config.policy.epsilon_cap, "the policy")
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


_Priced = tuple[Schedule, RunConfig]
"""A schedule and the configuration of its runs."""


def check_together(schedules: Sequence[_Priced]) -> None:
    """Holds the sum of all schedules that share a policy against its cap.

    Raises:
      ConfigError: two schedules give one policy different terms.
      BudgetExceeded: together they pass its cap.
    """
    policies: dict[tuple[str | None, str], list[_Priced]] = {}
    for schedule, config in schedules:
        if schedule.enabled:
            ledger = config.storage.ledger and open_store(config.storage.ledger).uri  # one spelling
            policy = (ledger, config.policy.policy_id)
            policies.setdefault(policy, []).append((schedule, config))
    for (_, policy_id), sharing in policies.items():
        if len(sharing) > 1:
            _check_policy(policy_id, sharing)


def _check_policy(policy_id: str, sharing: Sequence[_Priced]) -> None:
    names = ", ".join(schedule.name for schedule, _ in sharing)
    charged = {schedule.name: charge_of(config) for schedule, config in sharing}
    terms = charged[sharing[0][0].name][1]
    for name, (_, others) in charged.items():
        # The plan may differ where the policy filters; the rest is fixed for the policy's life.
        if dataclasses.replace(others, series=terms.series) != terms:
            raise ConfigError(
                f"schedules {names} share policy {policy_id}, and {name} gives it other terms; "
                "make the sections `policy`, and who is one user, the same"
            )
    blocks = {schedule.name: set(blocks_of(config.partition)) for schedule, config in sharing}
    done: set[frozenset[str]] = set()
    for block in sorted(set().union(*blocks.values())):
        weighing = frozenset(name for name, held in blocks.items() if block in held)
        if weighing in done or len(weighing) < 2:
            continue
        done.add(weighing)
        runs = {
            schedule.name: (schedule, charged[schedule.name][0])
            for schedule, _ in sharing
            if schedule.name in weighing
        }
        _check(
            f"schedules {', '.join(runs)} share policy {policy_id} and cost",
            runs,
            terms,
            terms.epsilon_cap,
            "the policy",
        )


_Runs = Mapping[str, "tuple[Schedule, Charge]"]
"""Name -> a schedule and what one run of it is charged."""


def _check(who: str, runs: _Runs, terms: PolicyTerms, cap: float, whose: str) -> Spent:
    """Prices all runs, and refuses with the number of runs that fit."""
    total = sum(schedule.runs for schedule, _ in runs.values())
    whole = _price(runs, terms, None)
    if whole is not None and whole.epsilon <= cap:
        return whole
    fits, passes = 0, total
    while passes - fits > 1:
        middle = (fits + passes) // 2
        price = _price(runs, terms, _moment(runs, middle))
        if price is not None and price.epsilon <= cap:
            fits = middle
        else:
            passes = middle
    due = _moment(runs, passes)
    if whole is not None:
        why = f"epsilon={whole.epsilon:.3f} in {total} runs, and {whose} allows {cap:.3f}"
    elif terms.series is not None:
        why = f"{total} runs, and the policy commits {terms.series.runs} of one plan"
    else:
        why = f"{total} runs, which leave nothing of delta={terms.delta:g}"
    raise BudgetExceeded(
        f"{who} {why}; the cap holds for {fits} runs, and run {passes}, due "
        f"{due:%Y-%m-%d %H:%M} UTC, would pass it: end earlier, run less often, or raise "
        "noise_multiplier"
    )


def _price(runs: _Runs, terms: PolicyTerms, until: datetime | None) -> Spent | None:
    """The price of what fires until a moment; None: the policy does not hold so many."""
    charges = [
        charge
        for schedule, charge in runs.values()
        for _ in range(schedule.runs if until is None else schedule.runs_until(until))
    ]
    try:
        return spent(terms, charges)
    except LedgerError:
        return None


def _moment(runs: _Runs, number: int) -> datetime:
    """When the run of this number, counted over all schedules, is due."""
    return sorted(slot for schedule, _ in runs.values() for slot in schedule.slots)[number - 1]
