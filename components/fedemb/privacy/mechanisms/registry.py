"""All mechanisms by `kind`: the one list, and how plans are made and read.

To add one: a module with a section and a class below `MechanismPlan`, and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedemb.errors import ArtifactError, ConfigError
from fedemb.foundation.canonical_json import canonical_json
from fedemb.privacy.mechanisms.blt import Blt
from fedemb.privacy.mechanisms.capped_image_poisson import CappedImagePoisson
from fedemb.privacy.mechanisms.fixed_size import FixedSize
from fedemb.privacy.mechanisms.group_poisson_gaussian import GroupPoissonGaussian
from fedemb.privacy.mechanisms.least_squares import LeastSquares
from fedemb.privacy.mechanisms.mechanism import SCHEMA, MechanismPlan, PublicNumbers
from fedemb.privacy.mechanisms.not_private import NotPrivate
from fedemb.privacy.mechanisms.poisson_gaussian import PoissonGaussian
from fedemb.privacy.mechanisms.random_allocation import RandomAllocation
from fedemb.privacy.mechanisms.section import MechanismConfig
from fedemb.privacy.mechanisms.tree_aggregation import TreeAggregation
from fedemb.privacy.mechanisms.user_poisson import UserPoisson

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.section import RunSettings

MECHANISMS: dict[str, type[MechanismPlan]] = {
    mechanism.kind_name(): mechanism
    for mechanism in (
        GroupPoissonGaussian,
        PoissonGaussian,
        CappedImagePoisson,
        RandomAllocation,
        LeastSquares,
        UserPoisson,
        FixedSize,
        TreeAggregation,
        Blt,
        NotPrivate,
    )
}
"""In the order in which they are shown; the first is the default of `fedemb plan`."""


def plan_mechanism(config: RunSettings) -> MechanismPlan:
    """Turns a configuration into a mechanism plan; some optimise their noise, which takes seconds.

    Raises:
      ConfigError: the mechanism cannot run on this partition with the guarantee it claims.
    """
    return plan_of(config.mechanism, public_numbers(config))


def plan_of(section: MechanismConfig, numbers: PublicNumbers) -> MechanismPlan:
    """Like `plan_mechanism`, from the parts that decide."""
    return MECHANISMS[section.kind].of(section, numbers)


def public_numbers(config: RunSettings) -> PublicNumbers:
    """What a plan takes from partition and policy."""
    return PublicNumbers(
        virtual_clients=config.partition.virtual_clients,
        groupings=config.partition.groupings,
        users_lower_bound=config.policy.users_lower_bound,
        max_images_per_user=config.partition.max_images_per_user,
        unit=config.policy.unit,
    )


def plan_from_json(value: Mapping[str, Any]) -> MechanismPlan:
    """Reads what `MechanismPlan.to_json` wrote; closed world.

    Raises:
      ArtifactError: another version or kind, or a field missing, extra, of the wrong type or out
        of bounds.
      PlanMismatch: a derived number is not the recomputed one.
    """
    fields = dict(value)
    schema, kind = fields.pop("schema", None), fields.get("kind")
    if schema != SCHEMA:
        raise ArtifactError(
            f"mechanism plan has schema {schema!r}, expected {SCHEMA!r}; plan the run again"
        )
    mechanism = MECHANISMS.get(kind) if isinstance(kind, str) else None
    if mechanism is None:
        raise ArtifactError(
            f"mechanism plan is of kind {kind!r}, known are {', '.join(MECHANISMS)}; read it with "
            "the version that wrote it"
        )
    try:
        plan = mechanism.model_validate(fields)
    except ConfigError as error:
        raise ArtifactError(f"{error}: this plan was not written by us") from error
    # As text, since True == 1: a field left out or read as another type shows.
    if canonical_json(plan.to_json()) != canonical_json(dict(value)):
        raise ArtifactError(
            f"mechanism plan of {kind} lacks a field or holds one of the wrong type; plan the run "
            "again"
        )
    return plan
