"""`fedemb bench`: what training costs on the available devices."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedemb.errors import ConfigError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.engine.jax.speed import Speed

CLASSES = tuple("abcdefghij")
_IN_ALL = 1.2
"""Times `--seconds` after which the command ends in the middle of a measurement."""
_LEGEND = """\
work: plain = one step of SGD without clipping. W1, W2 = one round of virtual clients.
      units = one round of DP-SGD.
K: Views of each image.
m: Images of a plain step. In private rounds, units or clients side by side on a device.
ratio: Time relative to the plain step of the same network above.
noise: Share of the noise in the time of a round."""


def bench(
    accelerator: Annotated[
        bool, typer.Option("--accelerator", help="Private rounds on JAX, on all devices it finds.")
    ] = False,
    backbone: Annotated[str, typer.Option(help="Net to measure, without a projection.")] = (
        "wrn_16_4"
    ),
    image_size: Annotated[int, typer.Option(help="Height and width of images.")] = 32,
    seconds: Annotated[
        float,
        typer.Option(
            help="Seconds after which no measurement starts; the command ends a fifth later."
        ),
    ] = 240.0,
    output: Annotated[Path, typer.Option(help="The figures, as JSON.")] = Path("bench.json"),
) -> None:
    """Compare the speed of private rounds with a plain training step.

    Unit gradients of DP-SGD with several micro-batches, and the two rounds of virtual clients of
    docs/explanation/performance.md.

    Example: fedemb bench
    """
    if not accelerator:
        raise ConfigError(
            "fedemb bench measures accelerators only. Pass --accelerator, or run `make bench` "
            "in a clone for processors."
        )
    from fedemb.models.keras_backend import use_backend

    use_backend("jax")
    from fedemb.config import ModelConfig
    from fedemb.engine.jax.speed import describe_device, fastest, measure

    model = ModelConfig(
        backbone=backbone, image_size=image_size, channels=3, classes=CLASSES, head_init="glorot"
    )
    found: dict[str, Any] = {
        "device": describe_device(),
        "model": model.model_dump(mode="json"),
        "rows": [],
    }
    say(", ".join(f"{name} {value}" for name, value in found["device"].items()))
    _keep(output, found)  # fails early if the file cannot be written
    say(_LEGEND)
    say("work   net        precision   K     m   us/view  ratio  noise  compile s  step MiB")
    speeds = []
    with _ends(_IN_ALL * seconds, output):
        for speed in measure(model, seconds):
            speeds.append(speed)
            say(_line(speed))
            found["rows"].append(speed._asdict())
            _keep(output, found)
    if best := fastest(speeds):
        say(
            f"fastest unit gradients: training.unit_gradient.microbatch: {best.microbatch}"
            + (", training.mixed_precision: true" if best.precision == "bfloat16" else "")
        )
    say(f"figures: {output}")


@contextmanager
def _ends(seconds: float, output: Path) -> Iterator[None]:
    """Ends the process then: what JAX compiles or computes cannot be interrupted."""

    def end() -> None:
        say(
            f"stopped after {seconds:.0f} s in the middle of a measurement; --seconds gives it "
            "more",
            f"figures: {output}",
        )
        os._exit(0)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _keep(output: Path, found: dict[str, Any]) -> None:
    write_bytes(output, (json.dumps(found, indent=1) + "\n").encode())


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
