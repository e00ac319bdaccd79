"""Registry of mechanisms by `kind`; creates and reads plans.

To add a mechanism, add a module with a section and a subclass of `MechanismPlan`, an entry here,
and an entry in `fedemb.reports.privacy_text`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedemb.errors import ArtifactError, ConfigError
from fedemb.foundation.canonical_json import JsonObject, canonical_json
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian, TreeAggregation
from fedemb.privacy.mechanism import SCHEMA, MechanismPlan
from fedemb.privacy.section import MechanismConfig, PublicNumbers
from fedemb.privacy.unit_mechanisms import CappedImagePoisson, Covariance, PoissonGaussian

if TYPE_CHECKING:
    from fedemb.privacy.section import RunSettings

MECHANISMS: dict[str, type[MechanismPlan]] = {
    mechanism.kind_name(): mechanism
    for mechanism in (
        GroupPoissonGaussian,
        PoissonGaussian,
        CappedImagePoisson,
        Covariance,
        TreeAggregation,
    )
}
"""In display order; the first is the default of `fedemb plan`."""


def plan_mechanism(config: RunSettings) -> MechanismPlan:
    """Returns the plan of a configuration.

    Raises:
      ConfigError: the mechanism cannot run on this partition with the guarantee it claims.
    """
    return plan_of(config.mechanism, config.public_numbers)


def plan_of(section: MechanismConfig, numbers: PublicNumbers) -> MechanismPlan:
    """Returns the plan of a section and public numbers; see `plan_mechanism`."""
    return MECHANISMS[section.kind].of(section, numbers)


def plan_from_json(value: JsonObject) -> MechanismPlan:
    """Reads a plan that `MechanismPlan.to_json` wrote; rejects unknown and missing fields.

    Raises:
      ArtifactError: another version or kind, or a field missing, extra, of the wrong type or out
        of bounds.
      PlanMismatch: a derived number is not the recomputed one.
    """
    fields = dict(value)
    schema, kind = fields.pop("schema", None), fields.get("kind")
    if schema != SCHEMA:
        raise ArtifactError(
            f"Mechanism plan has schema {schema!r}, expected {SCHEMA!r}. Plan the run again."
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
        raise ArtifactError(f"Mechanism plan of {kind}: {error}; plan the run again.") from error
    # Compared as text, because True == 1.
    if canonical_json(plan.to_json()) != canonical_json(value):
        raise ArtifactError(
            f"Mechanism plan of {kind} has a missing field or a field of the wrong type. Plan the "
            "run again."
        )
    return plan
