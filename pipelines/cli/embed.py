"""`fedemb embed`: loads a bundle only if it is unchanged since its release, see `trusted`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import InputError
from fedemb.pipelines.cli.data import counted
from fedemb.pipelines.cli.options import Owner, grouped, quiet, require_released
from fedemb.pipelines.output import say


@grouped
def embed(
    *,
    photos: Annotated[str, typer.Argument(help="Folder of photos, or Parquet.")],
    model: Annotated[Path, typer.Option("--model", "-m", help="Bundle of a release, a folder.")],
    output: Annotated[
        str, typer.Option("--output", "-o", help="File NAME.parquet to write, here or in a bucket.")
    ] = "embeddings.parquet",
    id_column: Annotated[
        str | None, typer.Option(help="Parquet: column that names the rows.")
    ] = None,
    owner: Owner,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use a folder that no trusted key vouches for.")
    ] = False,
) -> None:
    """Embed or classify photos with a released model.

    For classifiers, writes `probabilities` and `class` instead of `embedding`. A file that is not a
    photo gets a `reason` instead.

    Example: fedemb embed photos/ -m BUNDLE --policy policy -o embeddings.parquet
    """
    if not output.endswith(".parquet"):
        raise InputError(f"The output {output} does not end in .parquet. Add the ending.")
    if not insecure:
        require_released(model, owner.places().named("trust"))
    with quiet():
        from fedemb.partition.check import LEFT_OUT
        from fedemb.release.embed_photos import embed_photos
        from fedemb.release.released import ReleasedModel

        released = ReleasedModel(model)
    with counted("embedding photos") as progress:
        done = embed_photos(photos, released, output, id_column=id_column, progress=progress)
    classes = released.config.model.classes
    what = "probabilities" if classes else "an embedding"
    without = f", {done.bad:,} without {what} (see column reason)" if done.bad else ""
    say(f"{output}: {done.photos:,} photos{without}")
    if done.side_files:
        say(f"{done.side_files:,} left out: {LEFT_OUT['side_file']}")
    say(f"classes: {', '.join(classes)}" if classes else f"embedding space: {released.space_id}")
