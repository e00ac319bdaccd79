"""`fedemb check-data` and `fedemb make-data`. The command line registers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError
from fedemb.pipelines.cli.options import ConfigOption, DataOption, JsonOption, SetOption
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.partition.check import Check


@contextmanager
def counted(what: str) -> Iterator[Callable[[int], None]]:
    """Shows how many were done so far: a line in place on a terminal, elsewhere one now and then.

    Nothing of it goes to standard output, which others may read.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description} {task.completed:,}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done: bar.update(task, completed=done)


def check_data(
    config: ConfigOption = "quickstart",
    data: DataOption = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Check private images before a run: counts of records, bad records and users.

    Prints exact private figures, for the data owner only. Fails if too many records are bad.

    Example: fedemb check-data --config mine.yaml
    """
    from fedemb.config.data import BUILTIN
    from fedemb.partition.check import check
    from fedemb.pipelines.run.load_config import load_config, with_data

    checked = with_data(load_config(config, set_ or []), data)
    public = checked.pretraining.source
    if public is not None and public.uri == BUILTIN:  # glyphs drawn by `fedemb run`: no overlap
        checked = checked.updated({"pretraining.kind": "none", "pretraining.source": None})
    with counted("reading records") as progress:
        found = check(checked, progress)
    if json_:
        say_json(asdict(found))
    else:
        say(*_lines(found))
    if found.problems:
        raise InputError(" ".join(found.problems))


def _lines(found: Check) -> Iterator[str]:
    yield (
        f"{found.rows:,} records, {found.used:,} of them used, {100 * found.bad_fraction:.2f} % "
        "bad (exact private figures, for the data owner only)"
    )
    yield from (f"  {fact}" for fact in found.facts)
    for kind, reasons in (("bad", found.bad), ("left out", found.left_out)):
        for text, count in reasons:
            yield f"  {count:,} {kind}: {text}"
    yield from (f"warning: {text}" for text in found.warnings)


def make_data(
    output: Annotated[Path, typer.Argument(help="Folder for private.parquet and public.parquet.")],
    users: Annotated[int, typer.Option(help="Number of private identities.")] = 32_000,
    images_per_user: Annotated[int, typer.Option(help="Number of images of each identity.")] = 4,
    public_classes: Annotated[int, typer.Option(help="Number of public classes.")] = 2000,
    public_images_per_class: Annotated[int, typer.Option(help="Images of each public class.")] = 8,
    image_size: Annotated[
        int, typer.Option(min=8, max=512, help="Height and width in pixels.")
    ] = 28,
    seed: Annotated[int, typer.Option(help="Seed; the same seed draws the same images.")] = 0,
) -> None:
    """Write generated images as Parquet files, for a first try.

    Example: fedemb make-data photos --users 1000
    """
    from fedemb.data.builtin import write_builtin
    from fedemb.pipelines.run.load_config import load_config

    numbers = {
        "users": users,
        "images_per_user": images_per_user,
        "public_classes": public_classes,
        "public_images_per_class": public_images_per_class,
        "seed": seed,
    }
    if ":/" in str(output):
        raise InputError(f"{output} is an address. Pass a folder of this machine.")
    changes = [f"data.builtin.{name}={number}" for name, number in numbers.items()]
    builtin = load_config("quickstart", changes).data.builtin
    private, public = output / "private.parquet", output / "public.parquet"
    images, public_images = write_builtin(builtin, image_size, private, public)
    say(f"{private}: {images:,} images of {users:,} identities")
    say(f"{public}: {public_images:,} images of {public_classes:,} classes")
