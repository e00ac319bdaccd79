"""Plans of all mechanisms at equal public numbers, and noise of equal utility."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from fedemb.privacy.group_mechanisms import TreeAggregation, even_round_robin
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.section import PublicNumbers, Unit

Plan = TypeVar("Plan", bound=MechanismPlan)


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Public numbers from which any mechanism can be planned."""

    population: int
    users_per_client: int
    clients_per_round: int
    noise_multiplier: float
    rounds: int
    virtual_clients: int = 0
    """Number of virtual clients; 0 derives it from the population."""
    unit: Unit = "user"
    max_images_per_user: int = 1

    @property
    def groups(self) -> int:
        """Virtual clients."""
        return self.virtual_clients or max(1, round(self.population / self.users_per_client))

    @property
    def numbers(self) -> PublicNumbers:
        """Public numbers of a partition and policy for this cohort."""
        return PublicNumbers(
            virtual_clients=self.groups,
            groupings=1,
            users_lower_bound=self.population,
            max_images_per_user=self.max_images_per_user,
            unit=self.unit,
        )

    def section(self, mechanism: type[MechanismPlan]) -> dict[str, float]:
        """Returns the section of a mechanism, with participation as even as it allows."""
        fields, participants = mechanism.section.model_fields, self.clients_per_round
        one_round = mechanism.section.solves is not None
        found: dict[str, float] = {
            "rounds": 1 if one_round else self.rounds,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": min(1.0, participants / self.groups),
            "clients_per_round": participants,
            "units_per_round": self.population if one_round else participants,
            "images_per_round": participants,
        }
        if "min_separation" in fields:
            turns = even_round_robin(self.groups, participants, self.rounds)
            found["min_separation"], found["max_participations"] = turns
        return {name: value for name, value in found.items() if name in fields}

    def plan(self, mechanism: type[Plan]) -> Plan:
        """Returns the plan of a mechanism.

        Raises:
          ConfigError: the mechanism cannot run on these numbers.
        """
        tree = {"kind": mechanism.kind_name(), **self.section(mechanism)}
        return mechanism.of(mechanism.section.model_validate(tree), self.numbers)


def at_equal_utility(plan: Plan, independent_noise: float) -> Plan:
    """Returns the plan whose running sums of updates have the noise of independent rounds.

    The server applies the sum of all rounds so far. The root-mean-square noise of a tree, averaged
    over rounds, is made equal; see docs/privacy/accounting.md#equal-utility.
    """
    if not isinstance(plan, TreeAggregation):
        return plan.replaced(noise_multiplier=independent_noise)
    leaves = plan.restart_every or plan.rounds
    nodes = [
        (round_ // leaves) * leaves.bit_count() + (round_ % leaves + 1).bit_count()
        for round_ in range(plan.rounds)
    ]
    factor = math.sqrt((plan.rounds + 1) / 2 * len(nodes) / sum(nodes))
    return plan.replaced(noise_multiplier=independent_noise * factor)
