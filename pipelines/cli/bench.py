"""`fedemb bench`: what training costs on the devices at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError

CLASSES = tuple("abcdefghij")


def bench(
    accelerator: Annotated[
        bool, typer.Option("--accelerator", help="Unit gradients on JAX, on all devices it finds.")
    ] = False,
    backbone: Annotated[str, typer.Option(help="Net to measure, without a projection.")] = (
        "wrn_16_4"
    ),
    image_size: Annotated[int, typer.Option(help="Height and width of images.")] = 32,
    seconds: Annotated[float, typer.Option(help="After which nothing more is begun.")] = 240.0,
    output: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("bench.json"),
) -> None:
    """Measure DP-SGD's unit gradients beside a plain step of the same net; needs no TensorFlow."""
    if not accelerator:
        raise ConfigError(
            "fedemb bench measures accelerators; say --accelerator, or run `make bench` in a clone "
            "for processors"
        )
    from fedemb.backend import use_backend

    use_backend("jax")
    from fedemb.config import ModelConfig
    from fedemb.embedding.jax_speed import describe_device, measure

    model = ModelConfig(
        backbone=backbone, image_size=image_size, channels=3, classes=CLASSES, head_init="glorot"
    )
    device, rows = describe_device(), []
    typer.echo(", ".join(f"{name} {value}" for name, value in device.items()))
    typer.echo("precision   K     m  us/view  ratio  noise  compile s  peak MB")
    for speed in measure(model, seconds):
        noise = "-" if speed.noise_share is None else f"{speed.noise_share:.1%}"
        peak = "-" if speed.peak_megabytes is None else f"{speed.peak_megabytes:.0f}"
        typer.echo(
            f"{speed.precision:9} {speed.views or 'plain':>5} {speed.microbatch:5} "
            f"{speed.microseconds_per_view:8.1f} {speed.ratio:6.2f} {noise:>6} "
            f"{speed.compile_seconds:10.1f} {peak:>8}"
        )
        rows.append(speed._asdict())
        found = {"device": device, "model": model.model_dump(mode="json"), "rows": rows}
        output.write_text(json.dumps(found, indent=1) + "\n")
    typer.echo(f"figures: {output}")
