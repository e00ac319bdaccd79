"""`fedemb verify`, `fedemb lineage`: is a release what it says, and where does it come from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from components.fedemb.errors import Refused

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def verify_release(
    bundle: Annotated[
        str, typer.Argument(help="Release: a folder, or gs:// or s3://.../NAME/VERSION.")
    ],
    trust: Annotated[Path, typer.Option("--trust", help="Pinned keys from the data owner.")],
    ledger: Annotated[
        str | None, typer.Option("--ledger", help="Live ledgers; default: the copy inside.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Check a release: signature, digests, tensors, epsilon, ledger; offline."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from components.release_model.verify import verify_release as look

    found = look(bundle, trust, ledger)
    if json_:
        answer = {"verified": not found.problems, "problems": found.problems, **found.facts}
        typer.echo(json.dumps(answer, indent=1))
    if found.problems:
        raise Refused("not verified: " + "; ".join(found.problems))
    if not json_:
        typer.echo("verified: {name} {version}, of run {run_id}".format(**found.facts))
        typer.echo("guarantee: {guarantee}".format(**found.facts))
        if ledger is None:
            typer.echo("ledger: the copy inside; --ledger compares with the live one")


def lineage(
    run: Annotated[str, typer.Argument(help="Run, release or lineage file; a path or address.")],
    artifact: Annotated[str | None, typer.Option(help="Start here; default: the last one.")] = None,
    json_: JsonOption = False,
) -> None:
    """Print where an artifact comes from, as a tree."""
    from components.fedemb.lineage import read_steps, tree_lines

    steps = read_steps(run)
    if json_:
        typer.echo(json.dumps([vars(step) for step in steps], indent=1))
        return
    for line in tree_lines(steps, artifact):
        typer.echo(line)
