"""`fedemb plan`: the price of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.options import SetOption
from fedemb.pipelines.cli.planning.plan_numbers import PlanNumbers
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
    from fedemb.pipelines.cli.edit_config import write_mechanism
    from fedemb.pipelines.cli.planning.plan_text import lines
    from fedemb.pipelines.cli.planning.planned import calibrated, price_fields, priced
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
