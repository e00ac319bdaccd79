"""`fedemb plan`: the price of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.planning.plan_options import ConfigSource, PlanNumbers
from fedemb.pipelines.output import say, say_json


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
    context: typer.Context,
    source: ConfigSource,
    numbers: PlanNumbers,
    output: PlanOutput,
) -> None:
    """Price a run before it starts.

    Pass --config, or the numbers: --population, --clients-per-round, --rounds and one of
    --noise-multiplier and --target-epsilon.

    Example: fedemb plan --population 20000 --clients-per-round 10 --rounds 20 --target-epsilon 4
    """
    from fedemb.pipelines.cli.edit_config import write_mechanism
    from fedemb.pipelines.cli.planning.plan_text import lines
    from fedemb.pipelines.cli.planning.planned import config_of, price_fields, priced

    config = config_of(context, source, numbers)
    if (path := output.write) is not None:
        if source.config is None:
            raise ConfigError(
                "--write changes a configuration. Pass the configuration by --config."
            )
        new = not path.exists()
        write_mechanism(path, config)
        say(f"wrote {'the new file ' if new else ''}{path}", err=True)
    found = priced(config)
    if output.output is not None:
        write_bytes(output.output, found.document.data)  # unsigned: no step accepts it
    if output.json_:
        say_json(price_fields(config, found, output.output))
    else:
        say(*lines(config, found, output.output))
