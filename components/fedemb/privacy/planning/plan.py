"""A mechanism's plan and its price, for whoever asks before there is a run."""

from __future__ import annotations

from fedemb.config import MechanismConfig
from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanisms.mechanism import MechanismPlan, plan_of


def plan(
    mechanism: MechanismConfig,
    *,
    virtual_clients: int,
    groupings: int = 1,
    population: int | None = None,
) -> MechanismPlan:
    """Plans a mechanism: sampler, clip, noise and price in one object.

    >>> from fedemb.config import GroupPoissonGaussianConfig
    >>> mechanism = GroupPoissonGaussianConfig(
    ...     kind="group_poisson_gaussian", rounds=30, sampling_probability=0.1,
    ...     noise_multiplier=0.83)
    >>> round(epsilon(plan(mechanism, virtual_clients=900), delta=1e-5), 2)
    7.55

    Args:
      mechanism: its configuration.
      virtual_clients: virtual clients per grouping, a public constant.
      groupings: independent groupings.
      population: a public number below which the users never fall, for mechanisms that draw a
        fixed number of users; None takes one user per virtual client, which prices safely.

    Raises:
      ConfigError: the mechanism cannot run on these virtual clients with the guarantee it claims.
    """
    return plan_of(
        mechanism,
        virtual_clients=virtual_clients,
        groupings=groupings,
        users_lower_bound=population or virtual_clients,
    )


def guarantee(planned: MechanismPlan, delta: float) -> PrivacyGuarantee:
    """What a whole run of a plan guarantees to one user.

    Args:
      planned: from `plan`.
      delta: total failure probability; customary is population ** -1.1.

    Raises:
      ValueError: delta is not a probability above the sampler's share.
    """
    return price(planned.event(), planned.relation, delta, rounds=planned.rounds)


def epsilon(planned: MechanismPlan, delta: float) -> float:
    """The epsilon of `guarantee`: say it with delta, unit and relation, or print `guarantee`."""
    return guarantee(planned, delta).epsilon
