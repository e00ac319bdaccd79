"""The privacy loss of a hyperparameter search that releases only its best run.

Papernot and Steinke (arXiv 2110.03620): if the number of trials is drawn from a fixed distribution,
releasing the best trial costs little more than one trial. A fixed number of trials, or trials
chosen from earlier results, cost a full composition instead.
"""

from __future__ import annotations

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false
from dp_accounting import dp_event as dpe

from fedemb.errors import ConfigError
from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.search import SHAPES
from fedemb.privacy.randomness.trials import Law

CONDITIONS = (
    "the number of trials is drawn once from the {law} law with mean {mean:g}, before the first "
    "trial, and all of them are run",
    "every trial is this plan with other hyperparameters that cost no privacy; the settings to try "
    "are listed beforehand and drawn independently for each trial",
    "no trial is chosen by the result of another: no Bayesian search, no early stopping of weak "
    "trials",
    "only the best trial's model and its settings are released; scores and losers stay private",
    "the score is computed on public or separately charged data, or is part of the trial",
)
"""Conditions for the price of `price_tuning`. The program cannot check them; the team must."""


def price_tuning(plan: MechanismPlan, delta: float, mean: float, law: Law) -> PrivacyGuarantee:
    """Computes the guarantee of a search over runs of this plan that releases only the best.

    Args:
      plan: plan of one trial.
      delta: total failure probability of the whole search.
      mean: mean number of trials, above 1.
      law: distribution of the number of trials.

    Returns:
      An RDP guarantee: no other accountant supports this event.

    Raises:
      ConfigError: the mechanism has no noise, or the mean is out of bounds.
      UnsupportedAccounting: RDP is not valid for the mechanism.
    """
    if not plan.private:
        raise ConfigError(
            f"{plan.kind} has no guarantee, so a search over it has none; use a private mechanism"
        )
    if not 1 < mean <= 1e6:
        raise ConfigError(
            f"the mean number of trials must be above 1 and at most 1,000,000, got {mean:g}; "
            "correct it"
        )
    event = dpe.RepeatAndSelectDpEvent(plan.event(), mean, SHAPES[law])
    return price(event, plan.relation, delta, "rdp")


def conditions(mean: float, law: Law) -> list[str]:
    """Returns the text of the conditions."""
    return [text.format(mean=mean, law=law) for text in CONDITIONS]
