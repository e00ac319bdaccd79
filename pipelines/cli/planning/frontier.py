"""`fedemb frontier`: batch, rounds and noise of one epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.planning.plan_options import ConfigSource, PlanNumbers
from fedemb.pipelines.output import say, say_json


@grouped
def frontier(
    *,
    context: typer.Context,
    source: ConfigSource,
    numbers: PlanNumbers,
    units_per_second: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Units trained per second; adds a column of minutes."),
    ] = None,
    figure: Annotated[Path, typer.Option(help="SVG file to write.")] = Path("frontier.svg"),
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare batch sizes, rounds and noise at one epsilon.

    Example: fedemb frontier --config mine.yaml --target-epsilon 2 --units-per-second 50
    """
    from fedemb.pipelines.cli.planning.plan_text import frontier_lines, lines
    from fedemb.pipelines.cli.planning.planned import config_of, price_fields, priced
    from fedemb.steps.plan_privacy.frontier import draw_frontier

    if numbers.target_epsilon is None:
        raise ConfigError(
            "All settings of a frontier have the same epsilon. Pass it by --target-epsilon."
        )
    config = config_of(context, source, numbers)
    found = priced(config)
    drawn = draw_frontier(
        found.mechanism, found.guarantee.delta, numbers.target_epsilon, figure, units_per_second
    )
    if json_:
        say_json({**price_fields(config, found, None), "frontier": drawn})
    else:
        say(*lines(config, found, frontier_lines(drawn), None))
