"""Plans a mechanism and computes its guarantee before a run."""

from __future__ import annotations

from fedemb.errors import ConfigError
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.accounting.units import Unit
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_of
from fedemb.privacy.mechanisms.section import MechanismConfig, PublicNumbers
from fedemb.privacy.planning.prices import guarantee_of


def plan(
    mechanism: MechanismConfig,
    *,
    virtual_clients: int,
    groupings: int = 1,
    population: int | None = None,
    unit: Unit = "user",
    max_images_per_user: int | None = None,
) -> MechanismPlan:
    """Plans a mechanism: sampler, clipping norm, noise and privacy loss in one object.

    >>> from fedemb import GroupPoissonGaussianConfig
    >>> mechanism = GroupPoissonGaussianConfig(
    ...     rounds=30, sampling_probability=0.1, noise_multiplier=0.83)
    >>> round(epsilon(plan(mechanism, virtual_clients=900), delta=1e-5), 2)
    7.55

    Args:
      mechanism: configuration of the mechanism.
      virtual_clients: virtual clients per grouping, a public constant.
      groupings: independent groupings.
      population: public lower bound on the number of users, for mechanisms that draw a fixed number
          of users; None assumes one user per virtual client, which is a safe bound.
      unit: privacy unit: a user with all of their data, or one image.
      max_images_per_user: maximum number of images per user that take part. Required by mechanisms
          that sample individual images; a larger number costs more.

    Raises:
      ConfigError: the mechanism cannot run on these virtual clients with the guarantee it claims,
          or it samples images and `max_images_per_user` is not set.
    """
    numbers = PublicNumbers(
        virtual_clients=virtual_clients,
        groupings=groupings,
        users_lower_bound=population or virtual_clients,
        max_images_per_user=max_images_per_user or 1,
        unit=unit,
    )
    planned = plan_of(mechanism, numbers)
    if planned.samples_images and max_images_per_user is None:
        raise ConfigError(
            f"{planned.kind} samples single images of a user, so its price depends on their "
            "number; pass max_images_per_user"
        )
    return planned


def guarantee(planned: MechanismPlan, delta: float) -> PrivacyGuarantee:
    """Returns the guarantee of a whole run of a plan to one unit.

    Args:
      planned: result of `plan`.
      delta: total failure probability; usually population ** -1.1.

    Raises:
      ValueError: delta is not a probability above the sampler's share.
    """
    return guarantee_of(planned, delta)


def epsilon(planned: MechanismPlan, delta: float) -> float:
    """Returns epsilon of `guarantee`; report it with delta, unit and relation."""
    return guarantee(planned, delta).epsilon
