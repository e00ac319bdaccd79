"""The paper's extrapolation: what the same noise on the mean would cost with more users.

Simulated at one population, certified at another: the two are never mixed. A projection prices a
run that has not been made; it says what the guarantee would be if it were (dp.md 8; Xu et al.,
arXiv 2211.10844, section 4).
"""

# The numeric libraries ship no types; our own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.mechanisms.mechanism import MechanismPlan

LABEL = "projection, not a guarantee: no such run has been made"


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One plan, scaled to another population."""

    simulated_at: int
    """Users the plan was made for."""
    population: int
    """Users it is priced for."""
    virtual_clients: int
    clients_per_round: float
    """Expected virtual clients per round: the compute."""
    noise_multiplier: float
    delta: float
    epsilon: float
    compute_factor: float
    """Clients per round / clients per round of the plan."""
    label: str = LABEL

    def to_json(self) -> dict[str, Any]:
        """The projection as a JSON object; an infinite epsilon is null."""
        out = asdict(self)
        out["epsilon"] = self.epsilon if math.isfinite(self.epsilon) else None
        return out


def project(
    plan: MechanismPlan, simulated_at: int, population: int, delta: float | None = None
) -> Projection:
    """Prices a plan for another population at the same noise on the mean.

    Users per virtual client and sampling probability stay as they are; virtual clients, clients per
    round and noise multiplier grow together, so that their ratio, and with it the utility, stays.

    Args:
      plan: mechanism as simulated.
      simulated_at: its public population.
      population: the population to price it for.
      delta: total delta; by default, and wherever it would reach 1/population, population**-1.1.
    """
    factor = population / simulated_at
    scaled = plan.scaled(factor)
    customary = float(population**-1.1)
    safe = customary if delta is None or delta >= 1 / population else delta
    guarantee = price(scaled.event(), scaled.relation, safe)
    return Projection(
        simulated_at=simulated_at,
        population=population,
        virtual_clients=scaled.virtual_clients,
        clients_per_round=scaled.normaliser,
        noise_multiplier=scaled.noise_multiplier,
        delta=safe,
        epsilon=guarantee.epsilon,
        compute_factor=scaled.normaliser / plan.normaliser,
    )
