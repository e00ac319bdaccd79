"""Numbers of `fedemb plan` that make a configuration to price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from fedemb.config import RunConfig

_UNCAPPED = 1e9
"""Budget of a plan that is not part of a run."""


@dataclass(frozen=True, kw_only=True)
class PlanNumbers:
    """Numbers of a plan without a configuration: whole virtual clients, sampled by Poisson."""

    population: Annotated[int | None, typer.Option(min=2, help="Number of users.")] = None
    users_per_client: Annotated[
        int | None, typer.Option(min=1, help="Mean number of users per virtual client. [32]")
    ] = None
    clients_per_round: Annotated[
        int | None, typer.Option(min=1, help="Expected virtual clients per round.")
    ] = None
    rounds: Annotated[int | None, typer.Option(min=1, help="Training rounds.")] = None
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the noise / clip; or pass --target-epsilon."),
    ] = None
    delta: Annotated[
        float | None, typer.Option(help="Delta of the guarantee; default: users ** -1.1.")
    ] = None

    def given(self) -> list[str]:
        """Returns the options that were passed."""
        return [_spelled(name) for name, value in vars(self).items() if value is not None]

    def config(self) -> RunConfig:
        """Returns a configuration with exactly what is priced; the rest has defaults.

        Raises:
          ConfigError: numbers are missing or contradict one another.
        """
        from fedemb.pipelines.run.load_config import validate
        from fedemb.privacy.mechanisms.registry import GroupPoissonGaussian

        population, chosen, rounds = self.population, self.clients_per_round, self.rounds
        if population is None or chosen is None or rounds is None:
            needed = {"--population", "--clients-per-round", "--rounds"} - {*self.given()}
            raise ConfigError(
                f"{', '.join(sorted(needed))} is missing. Pass the option or --config; see --help."
            )
        clients = max(1, round(population / (self.users_per_client or 32)))
        if chosen > clients:
            raise ConfigError(
                f"--clients-per-round {chosen} exceeds the {clients} virtual clients. Lower "
                "--clients-per-round or --users-per-client."
            )
        noise = self.noise_multiplier
        return validate(
            {
                "purpose": "simulation",
                "data": {"source": {"uri": "builtin", "label_scope": "global"}},
                "partition": {"virtual_clients": clients},
                "mechanism": {
                    "kind": GroupPoissonGaussian.kind_name(),
                    "rounds": rounds,
                    "sampling_probability": chosen / clients,
                    "noise_multiplier": 1.0 if noise is None else noise,
                },
                "policy": {
                    "users_lower_bound": population,
                    "delta": self._delta(population),
                    "epsilon_cap": _UNCAPPED,
                },
            }
        )

    def _delta(self, population: int) -> float:
        customary = float(population**-1.1)
        delta = customary if self.delta is None else self.delta
        if delta >= 1 / population:
            fitting = int(1 / delta)
            while delta >= 1 / fitting:
                fitting -= 1
            raise ConfigError(
                f"--delta {delta:g} is not below 1 / {population}. Pass --delta {customary:.2g}, or"
                f" for the projection of a published epsilon --population {fitting}."
            )
        return delta


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
