"""`fedemb plan`: the price of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.planning.plan_options import ConfigSource, PlanNumbers
from fedemb.pipelines.cli.planning.planned import Priced, config_of, price_fields, priced
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.config import RunConfig


class TuningLaw(StrEnum):
    """Laws of the number of trials."""

    logarithmic = "logarithmic"
    geometric = "geometric"
    poisson = "poisson"


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search over settings, priced with the plan."""

    tuning_trials: Annotated[
        float | None, typer.Option(help="Mean number of trials of a search to price as well.")
    ] = None
    tuning_law: Annotated[
        TuningLaw | None,
        typer.Option(help="Law of the number of trials; default: logarithmic."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """Output of `fedemb plan`."""

    explain: Annotated[bool, typer.Option("--explain", help="Explain the plan in prose.")] = False
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    write: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file to write the planned mechanism to, such as its noise; with "
            "--simulate-at the simulation."
        ),
    ] = None
    output: Annotated[Path | None, typer.Option(help="JSON file to write the plan to.")] = None


@grouped
def plan(
    *,
    context: typer.Context,
    source: ConfigSource,
    numbers: PlanNumbers,
    search: Search,
    simulate_at: Annotated[
        str | None,
        typer.Option(help="Share of batch and noise to simulate the run at, such as 1/16 (TAN)."),
    ] = None,
    output: PlanOutput,
) -> None:
    """Price a run before it starts.

    Pass --config, or the numbers: --population, --clients-per-round, --rounds and one of
    --noise-multiplier and --target-epsilon.

    Example: fedemb plan --population 20000 --clients-per-round 10 --rounds 20 --target-epsilon 4
    """
    if search.tuning_law is not None and search.tuning_trials is None:
        raise ConfigError(
            "--tuning-law has no effect without --tuning-trials. Pass the mean number of trials."
        )
    config = config_of(context, source, numbers)
    if output.write is not None:
        _write_config(config, source, output.write, simulate_at)
    found = priced(config)
    fields = price_fields(config, found, output.output)
    fields |= _search_fields(found, search)
    if output.explain:
        fields["explanation"] = _explanation(config, found)
    if simulate_at is not None:
        from fedemb.privacy.planning.frontier import simulation_at

        fields["simulation"] = simulation_at(found.mechanism, simulate_at)
    if output.output is not None:
        from fedemb.foundation.files import write_bytes

        write_bytes(output.output, found.document.data)  # unsigned: no step accepts it
    show(fields, found, as_json=output.json_)


def show(fields: dict[str, Any], found: Priced, *, as_json: bool) -> None:
    """Prints the fields of a plan command."""
    from fedemb.pipelines.cli.planning.plan_text import lines

    if as_json:
        say_json(fields)
        return
    for line in lines(fields, found.mechanism):
        say(line)


def simulated(config: RunConfig, share: str) -> RunConfig:
    """Returns the configuration with the settings that `--simulate-at` prints."""
    from fedemb.pipelines.run.load_config import overridden
    from fedemb.privacy.mechanisms.registry import plan_mechanism
    from fedemb.privacy.planning.frontier import simulation_at

    return overridden(config, simulation_at(plan_mechanism(config), share)["settings"])


def _write_config(
    config: RunConfig, source: ConfigSource, path: Path, simulate_at: str | None
) -> None:
    from fedemb.pipelines.cli.edit_config import write_mechanism

    if source.config is None:
        raise ConfigError("--write changes a configuration. Pass the configuration by --config.")
    new = not path.exists()
    write_mechanism(path, simulated(config, simulate_at) if simulate_at else config)
    say(f"wrote {'the new file ' if new else ''}{path}", err=True)


def _search_fields(found: Priced, search: Search) -> dict[str, Any]:
    if search.tuning_trials is None:
        return {}
    from fedemb.privacy.planning.tuning import conditions, price_tuning

    trials, law = search.tuning_trials, (search.tuning_law or TuningLaw.logarithmic).value
    price = price_tuning(found.mechanism, found.guarantee.delta, trials, law)
    return {
        "tuning": {
            **price.to_json(),
            "sentence": str(price),
            "conditions": conditions(trials, law),
        }
    }


def _explanation(config: RunConfig, found: Priced) -> list[str]:
    from fedemb.config.adjacency import covers_change_own_data
    from fedemb.steps.plan_privacy.explain import explain

    return explain(
        found.mechanism, found.guarantee, covers_change_own_data(config, found.mechanism)
    )
