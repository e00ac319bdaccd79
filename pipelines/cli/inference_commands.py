"""`fedemb embed`, `search`, `export`, `serve`: a released model in use, registered in `main`.

A bundle is loaded only if it is unchanged since its release, see `trusted`; `fedemb verify` says
also whether it should have been.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError
from fedemb.foundation.files import read_foreign
from fedemb.pipelines.cli.data import counted
from fedemb.pipelines.cli.quiet import quiet
from fedemb.pipelines.cli.trusted import TrustOption, require_released, trust_of
from fedemb.pipelines.output import say, say_block

if TYPE_CHECKING:
    from fedemb.serving.released import ReleasedModel

OUTPUTS = (".parquet",)
"""File endings that `fedemb embed` writes."""
ModelOption = Annotated[Path, typer.Option("--model", "-m", help="Bundle of a release, a folder.")]


def _opened(bundle: Path, trust: Path | None) -> ReleasedModel:
    require_released(bundle, trust)
    with quiet():
        from fedemb.serving.released import ReleasedModel

        return ReleasedModel(bundle)


def embed(
    photos: Annotated[str, typer.Argument(help="Folder of photos, Parquet, or tar shards.")],
    model: ModelOption,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File NAME.parquet to write, here or in a bucket.")
    ] = "embeddings.parquet",
    id_column: Annotated[
        str | None, typer.Option(help="Parquet, tar: column that names the rows.")
    ] = None,
    beam: Annotated[
        list[str] | None,
        typer.Option(
            "--beam",
            help="Option of the Beam engine that spreads the photos over workers, see "
            "docs/how_to/partition.md; repeatable.",
        ),
    ] = None,
    trust: TrustOption = None,
) -> None:
    """Embed or classify photos with a released model; resumes after a stop.

    For classifiers, writes `probabilities` and `class` instead of `embedding`. A file that is not a
    photo gets a `reason` instead.

    Example: fedemb embed photos/ --model BUNDLE -o embeddings.parquet
    """
    if not output.endswith(OUTPUTS):
        raise InputError(
            f"The output {output} has no known file ending. Use one of: {', '.join(OUTPUTS)}."
        )
    from fedemb.serving.embed_photos import embed_photos
    from fedemb.steps.partition_users.check import LEFT_OUT

    released = _opened(model, trust)
    with counted("embedding photos") as progress:
        done = embed_photos(
            photos,
            released,
            output,
            id_column=id_column,
            beam_options=beam or (),
            progress=progress,
        )
    classes = released.config.model.classes
    what = "probabilities" if classes else "an embedding"
    without = f", {done.bad:,} without {what} (see column reason)" if done.bad else ""
    say(f"{output}: {done.photos:,} photos{without}")
    if done.side_files:
        say(f"{done.side_files:,} left out: {LEFT_OUT['side_file']}")
    say(f"classes: {', '.join(classes)}" if classes else f"embedding space: {released.space_id}")


def search(
    photo: Annotated[Path, typer.Argument(help="Photo to search for.")],
    embeddings: Annotated[
        Path, typer.Option("--in", help="Embeddings that `fedemb embed` wrote with this model.")
    ],
    model: ModelOption,
    count: Annotated[int, typer.Option("-k", min=1, help="Number of photos to print.")] = 5,
    false_accept_rate: Annotated[
        str | None,
        typer.Option(help="False accept rate of the label `match`; default: first of the report."),
    ] = None,
    trust: TrustOption = None,
) -> None:
    """Find the stored photos nearest to a photo.

    Example: fedemb search query.jpg --in embeddings.parquet --model BUNDLE
    """
    from fedemb.data.photos import MAX_BYTES, BadImageError
    from fedemb.serving.search import PhotoIndex, collapsed, require_embeddings, threshold

    released = _opened(model, trust)
    require_embeddings(released)
    released.check_parity()
    rate, least = threshold(model, false_accept_rate)
    index = PhotoIndex(embeddings, released)
    try:
        found = index.nearest(read_foreign(photo, MAX_BYTES, "the photo"), count)
    except BadImageError as error:
        raise InputError(f"{photo} cannot be read as a photo ({error}); name another") from error
    same = collapsed(index, least)
    for name, similarity in found:
        alike = similarity >= least and not same
        say(f"{similarity:6.3f}  {'match' if alike else '     '}  {name}")
    if same:
        say(same)
        return
    say(f"match: similarity of {least:.3f} or more, at a false accept rate of {float(rate):g}")


def export(
    model: Annotated[Path, typer.Argument(help="Bundle of a release, a folder.")],
    to: Annotated[list[str], typer.Option(help="Format: onnx, tflite or keras; repeatable.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")],
    trust: TrustOption = None,
) -> None:
    """Export a released model to ONNX, TFLite or Keras, and check the result.

    Example: fedemb export BUNDLE --to onnx -o exported
    """
    from fedemb.serving.export import export as write

    released = _opened(model, trust)
    released.check_parity()
    for form in to:
        say(f"wrote {write(released, form, output)}")


def serve(
    model: Annotated[Path, typer.Argument(help="Bundle of a release, a folder.")],
    name: Annotated[
        str | None,
        typer.Option(help="Version in the address of the model; default: version of the release."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8080,
    manifest: Annotated[
        str | None,
        typer.Option(
            help="Address of the published bundle. Print its KServe manifest instead of serving."
        ),
    ] = None,
    image: Annotated[
        str, typer.Option(help="Image `serve` by digest; required with --manifest.")
    ] = "",
    trust: TrustOption = None,
) -> None:
    """Serve a released model over HTTP (KServe V1 protocol).

    Example: fedemb serve BUNDLE --port 8080
    """
    from fedemb.serving import serve as serving

    released = _opened(model, trust)
    called = name or released.config.release_name
    if manifest is not None:
        import json

        import yaml

        from fedemb.keys.trust import TRUST_SCHEMA

        if "@sha256:" not in image:
            raise InputError(f"--image {image!r} has no digest; name it as REF@sha256:...")
        keys = json.dumps({"schema": TRUST_SCHEMA, **trust_of(model, trust).to_json()}, indent=1)
        documents = serving.manifests(called, manifest, image, keys)
        say_block(yaml.safe_dump_all(documents, sort_keys=False))
        return
    released.check_parity()
    say(f"http://{host}:{port}/v1/models/{called}:predict, space {released.space_id}")
    serving.run(released, called, host, port)
