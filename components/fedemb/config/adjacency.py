"""Whether a guarantee also covers users who change what they own, and stay."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from dp_accounting import NeighboringRelation

from fedemb.config import RunConfig
from fedemb.privacy.mechanisms.mechanism import MechanismPlan


def covers_change_own_data(config: RunConfig, plan: MechanismPlan) -> bool:
    """Whether the epsilon of a run holds for a user who changes all of their own data.

    The event must price a replaced update, and what changes must not move the user elsewhere: where
    a column decides who is held out, another value brings a person among those who are evaluated
    exactly; where a column names the cohort, another value has a second block pay for them.
    """
    stays = config.partition.evaluation.by == "hash" and config.data.source.columns.cohort is None
    return stays and plan.relation is NeighboringRelation.REPLACE_ONE
