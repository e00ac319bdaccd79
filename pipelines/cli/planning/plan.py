"""`fedemb plan`: the price of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.planning.plan_options import ConfigSource, PlanNumbers
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.config import RunConfig
    from fedemb.pipelines.cli.planning.planned import Priced


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
    from fedemb.pipelines.cli.planning import plan_text
    from fedemb.pipelines.cli.planning.planned import config_of, price_fields, priced
    from fedemb.privacy.planning.frontier import simulation_at

    config = config_of(context, source, numbers)
    if output.write is not None:
        _write_config(config, source, output.write, simulate_at)
    found = priced(config)
    fields: dict[str, object] = {}
    text: list[str] = []
    if output.explain:
        fields["explanation"] = paragraphs = _explanation(config, found)
        text += [line for paragraph in paragraphs for line in ("", paragraph)]
    if simulate_at is not None:
        cheaper = simulation_at(found.mechanism, simulate_at)
        fields["simulation"] = cheaper
        text += plan_text.simulation_lines(cheaper)
    if output.output is not None:
        write_bytes(output.output, found.document.data)  # unsigned: no step accepts it
    if output.json_:
        say_json({**price_fields(config, found, output.output), **fields})
    else:
        say(*plan_text.lines(config, found, text, output.output))


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


def _explanation(config: RunConfig, found: Priced) -> list[str]:
    from fedemb.config.adjacency import covers_change_own_data
    from fedemb.steps.plan_privacy.explain import explain

    return explain(
        found.mechanism, found.guarantee, covers_change_own_data(config, found.mechanism)
    )
