"""Options that several commands share, one wording each."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigOption = Annotated[
    str, typer.Option("--config", "-c", help="YAML file, or the name of a preset.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a.b=c; may be given often.")
]
DataOption = Annotated[str | None, typer.Option(help="The images: replaces data.source.uri.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
