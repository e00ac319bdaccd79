"""Checks whether a guarantee also covers users who change their own data and stay."""

# dp-accounting ships no types.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from dp_accounting.privacy_accountant import NeighboringRelation

from fedemb.config import RunConfig
from fedemb.privacy.mechanisms.mechanism import MechanismPlan


def covers_change_own_data(config: RunConfig, plan: MechanismPlan) -> bool:
    """Returns whether the epsilon of a run holds for a user who changes all of their own data.

    Two conditions must hold. The event must price a replaced update. The change must not move the
    user to another group: if a column decides who is held out, a new value can move a user into the
    exactly evaluated set, and if a column names the cohort, a new value charges a second block.
    """
    stays = config.partition.evaluation.by == "hash" and config.data.source.columns.cohort is None
    return stays and plan.relation is NeighboringRelation.REPLACE_ONE
