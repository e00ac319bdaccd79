"""`fedemb backbone`: public backbones by name, and the card of a backbone file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import InputError
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import require_output
from fedemb.pipelines.cli.options import JsonOption, quiet
from fedemb.pipelines.output import say, say_block, say_json

backbone_app = typer.Typer(help="Get and inspect public backbones.", no_args_is_help=True)


@backbone_app.command()
def get(
    name: Annotated[str, typer.Argument(help="Name in `fedemb backbone show`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Backbone file to write.")],
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Height and width of the input images in pixels; default: 224. Half the size "
            "takes a quarter of the time.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="File of the weights; default: the installed package, or a download."),
    ] = None,
) -> None:
    """Write a public backbone to a file.

    Example: fedemb backbone get efficientnet_lite0 -o lite0.keras --size 128
    """
    from fedemb.models.public_backbones import write_named

    require_output(output)
    with quiet():
        card = write_named(name, output, size, weights)
    size = card.image_size
    say(
        f"wrote {output}: {size} x {size} pixels to {card.features:,} features",
        f"next: fedemb init --data PHOTOS --public {output}",
    )


@backbone_app.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="Backbone file.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show architecture, pixels, taps, licence and origin of a backbone file; without one, names.

    Example: fedemb backbone show lite0.keras
    """
    from fedemb.models.backbone_files import read_card

    if file is None:
        _list_names(json_)
        return
    card = read_card(file)
    if card is None:
        raise InputError(
            f"{file} has no card: it was not written by `fedemb backbone get`. Pass it to `fedemb "
            "init --public` with --pixels."
        )
    if json_:
        say_json(card.content())
        return
    taps = (f"{tap.name} ({tap.features:,} features, layer {tap.layer})" for tap in card.taps)
    say(
        f"name:          {card.name}",
        f"architecture:  {card.architecture}",
        f"input:         {card.image_size} x {card.image_size} pixels, {card.channels} channels",
        f"trained on:    pixels {card.trained_pixels}, converted by the first layer",
        f"output:        {card.features:,} features",
        f"weights:       {card.parameters:,}",
        *(f"tap:           {tap}" for tap in taps),
        f"licence:       {card.licence}",
        f"provenance:    {card.provenance}",
        f"source:        {card.source}",
        f"source SHA-256 {card.source_sha256}",
        f"file SHA-256   {file_digest(file)}",
    )
    if card.licence_text:
        say("", "licence text:")
        say_block(card.licence_text)


def _list_names(json_: bool) -> None:
    from fedemb.models.public_backbones import installed, named_backbones

    with quiet():
        found = named_backbones()
    entries = [
        {"name": name, "origin": origin, "installed": name[:6] == "keras-" or bool(installed(name))}
        for name, origin in found.items()
    ]
    if json_:
        say_json(entries)
        return
    width = max(map(len, found))
    for entry in entries:
        missing = "" if entry["installed"] else " (not installed)"
        say(f"{entry['name']:{width}}  {entry['origin']}{missing}")
