"""Projects a plan to another population: the guarantee of such a run.

A simulation at one population and a certified guarantee at another are never mixed
(docs/how_to/choose_epsilon.md#projections; Xu et al., arXiv 2211.10844, section 4).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fedemb.foundation.canonical_json import JsonObject
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.prices import finite, guarantee_of


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A plan scaled to another population."""

    simulated_at: int
    """Number of users of the plan."""
    population: int
    """Number of users of the projection."""
    virtual_clients: int
    clients_per_round: float
    """Expected virtual clients per round, which determines the compute."""
    noise_multiplier: float
    delta: float
    epsilon: float
    compute_factor: float
    """Clients per round / clients per round of the plan."""

    def to_json(self) -> JsonObject:
        """Returns the projection as a JSON object; an infinite epsilon is null."""
        return {**asdict(self), "epsilon": finite(self.epsilon)}


def project(
    plan: MechanismPlan, simulated_at: int, population: int, delta: float | None = None
) -> Projection:
    """Prices a plan for another population at the same noise on the mean, see `scaled`.

    Args:
      plan: simulated mechanism.
      simulated_at: public population of the simulation.
      population: population of the projection.
      delta: total delta; population**-1.1 by default, and if it would reach 1/population.
    """
    factor = population / simulated_at
    scaled = plan.scaled(population=factor, compute=factor)
    customary = float(population**-1.1)
    safe = customary if delta is None or delta >= 1 / population else delta
    return Projection(
        simulated_at=simulated_at,
        population=population,
        virtual_clients=scaled.virtual_clients,
        clients_per_round=scaled.normalizer,
        noise_multiplier=scaled.noise_multiplier,
        delta=safe,
        epsilon=guarantee_of(scaled, safe).epsilon,
        compute_factor=scaled.normalizer / plan.normalizer,
    )
