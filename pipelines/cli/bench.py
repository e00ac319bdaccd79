"""`fedemb bench`: what training costs on the devices at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from fedemb.embedding.jax_speed import Speed

CLASSES = tuple("abcdefghij")


def bench(
    accelerator: Annotated[
        bool, typer.Option("--accelerator", help="Private rounds on JAX, on all devices it finds.")
    ] = False,
    backbone: Annotated[str, typer.Option(help="Net to measure, without a projection.")] = (
        "wrn_16_4"
    ),
    image_size: Annotated[int, typer.Option(help="Height and width of images.")] = 32,
    seconds: Annotated[float, typer.Option(help="After which nothing more is begun.")] = 240.0,
    output: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("bench.json"),
) -> None:
    """Measure private rounds beside a plain step of the same net; needs no TensorFlow.

    Unit gradients of DP-SGD with several micro-batches, and the two rounds of virtual clients of
    docs/performance.md.
    """
    if not accelerator:
        raise ConfigError(
            "fedemb bench measures accelerators; say --accelerator, or run `make bench` in a clone "
            "for processors"
        )
    from fedemb.backend import use_backend

    use_backend("jax")
    from fedemb.config import ModelConfig
    from fedemb.embedding.jax_speed import describe_device, fastest, measure

    model = ModelConfig(
        backbone=backbone, image_size=image_size, channels=3, classes=CLASSES, head_init="glorot"
    )
    device, speeds = describe_device(), []
    typer.echo(", ".join(f"{name} {value}" for name, value in device.items()))
    typer.echo("work   net        precision   K     m   us/view  ratio  noise  compile s  step MiB")
    for speed in measure(model, seconds):
        speeds.append(speed)
        typer.echo(_line(speed))
        rows = [speed._asdict() for speed in speeds]
        found = {"device": device, "model": model.model_dump(mode="json"), "rows": rows}
        output.write_text(json.dumps(found, indent=1) + "\n")
    if best := fastest(speeds):
        typer.echo(
            f"fastest unit gradients: training.unit_gradient.microbatch: {best.microbatch}"
            + (", training.mixed_precision: true" if best.precision == "bfloat16" else "")
        )
    typer.echo(f"figures: {output}")


def _line(speed: Speed) -> str:
    named = (
        f"{speed.work:6} {speed.net:10} {speed.precision:9} {speed.views:3} {speed.microbatch:5}"
    )
    if not speed.microseconds_per_view:
        return f"{named}  does not fit into memory"
    noise = "-" if speed.noise_share is None else f"{speed.noise_share:.1%}"
    step = "-" if speed.step_megabytes is None else f"{speed.step_megabytes:.0f}"
    return (
        f"{named} {speed.microseconds_per_view:9.1f} {speed.ratio:6.2f} {noise:>6} "
        f"{speed.compile_seconds:10.1f} {step:>9}"
    )
