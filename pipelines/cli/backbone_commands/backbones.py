"""`fedemb backbone`: public backbones by name, and the card of a backbone file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.digests import file_digest
from fedemb.foundation.files import require_output
from fedemb.pipelines.cli.options import JsonOption
from fedemb.pipelines.cli.quiet import quiet
from fedemb.pipelines.output import say, say_block, say_json

if TYPE_CHECKING:
    from fedemb.models.public_backbone.built import Built
    from fedemb.models.public_backbone.card import BackboneCard

backbone_app = typer.Typer(help="Get and inspect public backbones.", no_args_is_help=True)

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Backbone file to write.")]


@backbone_app.command(name="list")
def list_backbones(json_: JsonOption = False) -> None:
    """List the public backbones that can be used by name.

    Example: fedemb backbone list
    """
    from fedemb.models.public_backbone.catalogue import named_backbones

    entries = list(named_backbones().values())
    if json_:
        fields = ("name", "architecture", "size", "features", "parameters", "licence", "origin")
        say_json(
            [
                {**{name: getattr(entry, name) for name in fields}, "installed": entry.ready}
                for entry in entries
            ]
        )
        return
    width = max(len(entry.name) for entry in entries)
    say(f"{'name':{width}}  pixels  features  weights  licence     source")
    for entry in entries:
        missing = "" if entry.ready else " (not installed)"
        say(
            f"{entry.name:{width}}  {entry.size:>6}  {entry.features:>8,}  "
            f"{entry.parameters / 1e6:>5.1f} M  {entry.licence:<10}  {entry.origin}{missing}"
        )


@backbone_app.command()
def get(
    name: Annotated[str, typer.Argument(help="Name in `fedemb backbone list`.")],
    output: OutputOption,
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Height and width of the input images in pixels; default: those of the training. "
            "Half the size takes a quarter of the time.",
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
    from fedemb.models.public_backbone.catalogue import named_backbone

    require_output(output)
    entry = named_backbone(name)
    with quiet():
        card = entry.write(output, size, weights)
    _say_written(output, card.image_size, card.features)


@backbone_app.command()
def convert(
    file: Annotated[
        Path, typer.Argument(help=".keras file, safetensors file, or PyTorch state dict.")
    ],
    output: OutputOption,
    architecture: Annotated[
        str | None,
        typer.Option(
            help="Not for .keras: resnet50, mobilenetv3_large, convnext_tiny, vit_small or "
            "dinov2_small, with the names of timm."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Not for .keras: height and width in pixels; default: 224."),
    ] = None,
    pixels: Annotated[
        str | None,
        typer.Option(
            help="Pixel values of the training: -1..1, 0..1, 0..255, imagenet or caffe; default: "
            "as the file or the architecture states."
        ),
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="Licence of the weights; default: as the file states.")
    ] = None,
    provenance: Annotated[
        str | None, typer.Option(help="Origin of weights and training images, in one line.")
    ] = None,
) -> None:
    """Convert a file of weights to a backbone file, with batch normalisation folded.

    Example: fedemb backbone convert dino.safetensors -o dino.keras --architecture dinov2_small
    """
    from fedemb.config import PretrainingConfig
    from fedemb.models.public_backbone.built import write_built

    require_output(output)
    with quiet():
        built, card = _read_network(file, architecture, size, pixels)
        written = write_built(
            built,
            output,
            name=_name(file),
            architecture=card.architecture if card else built.network.name,
            licence=licence or (card or PretrainingConfig()).licence,
            provenance=provenance or (card or PretrainingConfig()).provenance,
        )
    _say_written(output, written.image_size, written.features)
    if written.licence == PretrainingConfig().licence:
        say("warning: the licence is unknown. Pass --licence and --provenance")


def _read_network(
    file: Path, architecture: str | None, size: int | None, pixels: str | None
) -> tuple[Built, BackboneCard | None]:
    """Returns the network of a file of weights, and its card if the file has one."""
    if file.suffix == ".keras":
        from fedemb.models.public_backbone.card import read_card
        from fedemb.models.public_backbone.keras_network import of_file

        if architecture or size:
            raise ConfigError("--architecture and --size do not apply to .keras files. Remove them")
        return of_file(file, pixels), read_card(file)
    from fedemb.models.public_backbone.convert import ARCHITECTURES, convert_tensors

    if architecture is None:
        raise ConfigError(
            f"--architecture is missing. Pass the one of {file.name}: {', '.join(ARCHITECTURES)}"
        )
    return convert_tensors(file, architecture, size, pixels), None


def _name(file: Path) -> str:
    """Returns the name of a file as a name of a backbone."""
    return re.sub(r"[^a-z0-9._-]+", "-", file.stem.lower())[:60].strip("._-") or "converted"


@backbone_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="Backbone file.")], json_: JsonOption = False
) -> None:
    """Show architecture, size, pixels, taps, licence and origin of a backbone file.

    Example: fedemb backbone show lite0.keras
    """
    from fedemb.models.public_backbone.card import read_card

    card = read_card(file)
    if card is None:
        raise InputError(
            f"{file} has no card: it was not written by `fedemb backbone`. Write it again with "
            f"`fedemb backbone convert {file} -o NEW.keras`"
        )
    if json_:
        say_json(card.content())
        return
    taps = (f"{tap.name} ({tap.features:,} features, layer {tap.layer})" for tap in card.taps)
    constants = (f"{one.name} {one.shape} from {one.images}" for one in card.constants)
    say(
        f"name:          {card.name}",
        f"architecture:  {card.architecture}",
        f"input:         {card.image_size} x {card.image_size} pixels, {card.channels} channels",
        f"trained on:    pixels {card.trained_pixels}, converted by the first layer",
        f"output:        {card.features:,} features",
        f"weights:       {card.parameters:,}",
        *(f"tap:           {tap}" for tap in taps),
        *(f"constants:     {one}" for one in constants),
        f"licence:       {card.licence}",
        f"provenance:    {card.provenance}",
        f"source:        {card.source}",
        f"source SHA-256 {card.source_sha256}",
        f"file SHA-256   {file_digest(file)}",
    )
    if card.licence_text:
        say("", "licence text:")
        say_block(card.licence_text)


def _say_written(output: Path, size: int, features: int) -> None:
    say(
        f"wrote {output}: {size} x {size} pixels to {features:,} features",
        f"next: fedemb init --data PHOTOS --public {output}",
    )
