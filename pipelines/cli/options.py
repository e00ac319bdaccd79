"""Options that several commands share, one wording each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    str, typer.Option("--config", "-c", help="YAML file, or the name of a preset.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting to override, such as mechanism.rounds=20; repeatable."),
]
DataOption = Annotated[str | None, typer.Option(help="Private images; replaces data.source.uri.")]
RunsOption = Annotated[Path, typer.Option(help="Folder of all runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
