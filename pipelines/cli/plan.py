"""`fedemb plan`: the price of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.options import SetOption, grouped
from fedemb.pipelines.output import say, say_json

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
        from fedemb.privacy.group_mechanisms import GroupPoissonGaussian

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


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """Output of `fedemb plan`."""

    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    write: Annotated[
        Path | None,
        typer.Option(help="Configuration file to write the planned mechanism to, with its noise."),
    ] = None
    output: Annotated[Path | None, typer.Option(help="JSON file to write the plan to.")] = None


@grouped
def plan(
    *,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="YAML file or preset; excludes the numbers."),
    ] = None,
    set_: SetOption = None,
    numbers: PlanNumbers,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon for which the smallest noise is searched.")
    ] = None,
    output: PlanOutput,
) -> None:
    """Price a run before it starts.

    Pass --config, or the numbers: --population, --clients-per-round, --rounds and one of
    --noise-multiplier and --target-epsilon.

    Example: fedemb plan --population 20000 --clients-per-round 10 --rounds 20 --target-epsilon 4
    """
    from fedemb.pipelines.cli.config_text import write_mechanism
    from fedemb.pipelines.cli.planned import calibrated, lines, price_fields, priced
    from fedemb.pipelines.run.load_config import load_config, overridden

    if config is None:
        if (numbers.noise_multiplier is None) == (target_epsilon is None):
            raise ConfigError(
                "Pass exactly one of --noise-multiplier and --target-epsilon, or --config."
            )
        planned = overridden(numbers.config(), set_ or [])
    elif given := numbers.given():
        raise ConfigError(
            f"{', '.join(given)} and --config exclude each other. Change the configuration with "
            "--set, for example --set mechanism.rounds=20."
        )
    else:
        planned = load_config(config, set_ or [])
    if target_epsilon is not None:
        planned = calibrated(planned, target_epsilon)
    if (path := output.write) is not None:
        if config is None:
            raise ConfigError(
                "--write changes a configuration. Pass the configuration by --config."
            )
        write_mechanism(path, planned)
        say(f"wrote {path}", err=True)
    found = priced(planned)
    if output.output is not None:
        write_bytes(output.output, found.document.data)  # unsigned: no step accepts it
    if output.json_:
        say_json(price_fields(planned, found, output.output))
    else:
        say(*lines(planned, found, output.output))
