"""`fedemb extrapolate`: epsilon against users and compute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.planning.plan_options import ConfigSource, PlanNumbers
from fedemb.pipelines.output import say, say_json


@grouped
def extrapolate(
    *,
    context: typer.Context,
    source: ConfigSource,
    numbers: PlanNumbers,
    figure: Annotated[Path, typer.Option(help="SVG file to write.")] = Path("extrapolate.svg"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Project epsilon to more users and more compute.

    Example: fedemb extrapolate --config quickstart --figure extrapolate.svg
    """
    from fedemb.pipelines.cli.planning.plan_text import extrapolation_lines, lines
    from fedemb.pipelines.cli.planning.planned import config_of, price_fields, priced
    from fedemb.steps.plan_privacy.extrapolate import extrapolate as draw

    config = config_of(context, source, numbers)
    found = priced(config)
    if not found.mechanism.private:
        raise ConfigError(
            f"Mechanism {found.mechanism.kind} adds no noise and has no epsilon to project. Pass "
            "another --mechanism."
        )
    users_per_client = None if source.config is not None else numbers.users_per_client
    drawn = draw(config, found.mechanism, figure, users_per_client)
    if json_:
        say_json({**price_fields(config, found, None), "extrapolation": drawn})
    else:
        say(*lines(config, found, extrapolation_lines(drawn), None))
