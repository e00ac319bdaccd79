"""Parts of all studies: plans at equal public numbers, rounds in memory, results in files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedemb.privacy.group_mechanisms import TreeAggregation
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.section import PublicNumbers, Unit

Plan = TypeVar("Plan", bound=MechanismPlan)
_STANDALONE = (
    "<style>svg{color:#1c2430}text{fill:currentColor}@media(prefers-color-scheme:dark)"
    "{svg{color:#e8e6e1;--soft:#a7adb8;--line:#3a404b;--series-1:#72c2dc;--series-2:#f0a266;"
    "--series-3:#b9a6f2}}</style>"
)
"""Colours of a figure outside a page."""


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
        everybody = mechanism.section.solves
        found: dict[str, float] = {
            "rounds": 1 if everybody else self.rounds,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": min(1.0, participants / self.groups),
            "clients_per_round": participants,
            "units_per_round": self.population if everybody else participants,
            "images_per_round": participants,
        }
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


class TableFile:
    """Results of a study by key, a JSON object in each line, so that the study resumes.

    Args:
      path: the file, made with its folder by the first result.
    """

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> dict[str, dict[str, Any]]:
        """Reads all results; of several with one key, the last."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return {row.pop("key"): row for row in rows}

    def put(self, key: str, row: Mapping[str, Any]) -> None:
        """Appends a result; call it from one process only."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, **row}, sort_keys=True) + "\n")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def standalone(svg: str) -> bytes:
    """Returns a figure as a file of its own, legible on light and dark pages."""
    opening, rest = str(svg).split(">", 1)  # str: Markup would escape what is added
    return f"{opening}>{_STANDALONE}{rest}".encode()
