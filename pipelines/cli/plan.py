"""`fedemb plan`: the price of a run before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from fedemb.pipelines.cli.options import ConfigOption, JsonOption, SetOption
from fedemb.pipelines.output import say, say_json


def plan(
    config: ConfigOption = "quickstart",
    set_: SetOption = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Epsilon for which the smallest noise is searched.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Price a run before it starts. Reads no photo.

    Example: fedemb plan --config mine.yaml --set mechanism.rounds=20 --target-epsilon 4
    """
    from fedemb.pipelines.cli.planned import calibrated, lines, price_fields, priced
    from fedemb.pipelines.run.load_config import load_config

    planned = load_config(config, set_ or [])
    if target_epsilon is not None:
        planned = calibrated(planned, target_epsilon)
    found = priced(planned)
    if json_:
        say_json(price_fields(planned, found))
    else:
        say(*lines(planned, found))
