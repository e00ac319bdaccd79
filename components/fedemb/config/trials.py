"""Plans of the trials of a private search, and the check that no trial exceeds the price."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import numpy as np

from fedemb.config.run import RunConfig
from fedemb.errors import ConfigError, FedEmbError
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import public_numbers


def trial_plan(plan: MechanismPlan, config: RunConfig, recipe: str | None) -> MechanismPlan:
    """Returns the plan of one trial; `plan` itself without a recipe.

    Args:
      plan: plan of the configuration.
      config: configuration of the run.
      recipe: name of a declared recipe; None: the run is not a search.

    Raises:
      ConfigError: the recipe is not declared, or its mechanism cannot run.
      PlanMismatch: the recipe needs other derived numbers than the plan has.
    """
    if recipe is None:
        return plan
    trial = config.tuned(recipe)
    return plan.expected(trial.mechanism, public_numbers(trial))


def check_recipes(config: RunConfig, plan: MechanismPlan) -> None:
    """Checks that every recipe costs at most the run that is priced, at every Rényi order.

    The price of a search grows with the Rényi divergences of its trials, so it then holds for
    trials with any of the recipes.

    Args:
      config: configuration of the run.
      plan: its plan.

    Raises:
      ConfigError: a recipe costs more, has more rounds, or has another relation.
    """
    search = config.tuning.search
    if search is None:
        return
    from fedemb.privacy.accounting.accounting import RDP_ORDERS, rdp_of

    priced = plan.replaced(search=None)
    orders = np.union1d(RDP_ORDERS, [config.policy.renyi_order])
    for name in search.names:
        try:
            trial = trial_plan(plan, config, name)
            problem = _problem(trial, priced)
            if problem is None and trial.event() != priced.event():
                losses = (rdp_of(item.event(), item.relation, orders) for item in (trial, priced))
                loss, limit = losses
                if not np.all(loss <= limit):  # NaN fails
                    problem = "costs more privacy than the configuration without it"
        except FedEmbError as error:
            raise ConfigError(
                f"recipe {name!r} of tuning.search cannot run: {error}. Correct the recipe"
            ) from error
        if problem is not None:
            raise ConfigError(
                f"recipe {name!r} of tuning.search {problem}, and the search is priced by that. "
                "Set mechanism to the most expensive run of the search, or change the recipe"
            )


def _problem(trial: MechanismPlan, priced: MechanismPlan) -> str | None:
    if trial.rounds > priced.rounds:
        return f"has {trial.rounds} rounds, and mechanism.rounds is {priced.rounds}"
    if trial.relation != priced.relation or not trial.private:
        return "has another neighbouring relation than the mechanism"
    return None
