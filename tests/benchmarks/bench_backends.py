"""TensorFlow against JAX on one core of a processor: the same rounds, in turn, in one run.

    python -m tests.benchmarks.bench_backends [--works W1,W2,W3,W3-views16] [--pairs 3] [--json F]

Keras runs on one backend in a process, so each has its own process on the same core; they work
in turn, so that a busy machine hits both. A ratio is of processor seconds, JAX over TensorFlow; the
median and the extremes over pairs are printed. W1 and W2 are the rounds of virtual clients of
docs/explanation/performance.md with a share of the clients, W3 its unit gradients, with 1 and 16
views.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.benchmarks.tiny import TINY

BACKENDS = ("tensorflow", "jax")
CLIENTS: dict[str, tuple[str, int, Literal[1, 3], int, int, int]] = {
    "W1": ("lenet", 28, 1, 128, 32, 4),
    "W2": ("resnet8", 32, 3, 64, 16, 1),
}
"""Net, size, channels; images of a client, its batch, its epochs."""
if TINY:
    CLIENTS = {"W1": ("tiny", 12, 1, 4, 2, 1), "W2": ("tiny", 12, 3, 4, 2, 1)}
SHARE = 2
"""Virtual clients of a round."""
UNITS = {"W3": (2, 1), "W3-views16": (1, 16)} if TINY else {"W3": (64, 1), "W3-views16": (8, 16)}
"""Units of a round, views of each."""


def _clients(name: str, backend: Literal["tensorflow", "jax"]) -> tuple[Any, list[Any]]:
    from fedemb.config import LocalTrainingConfig, ModelConfig, TrainingConfig
    from fedemb.engine.backend_rounds import build_rounds
    from fedemb.engine.rounds import ClientExamples
    from fedemb.models.backbones import build_backbone

    net, size, channels, examples, batch, epochs = CLIENTS[name]
    model = ModelConfig(backbone=net, image_size=size, channels=channels)
    local = LocalTrainingConfig(
        batch_size=batch, epochs=epochs, max_examples_per_client=examples, client_learning_rate=0.02
    )
    training = TrainingConfig(backend=backend, local=local, parallel_clients=SHARE)
    function, _ = build_rounds(build_backbone(model, 0), _mechanism(), model, training, workers=1)
    random = np.random.default_rng(0)
    shape = (examples, size, size, channels)
    return function, [
        ClientExamples(0, n, random.integers(0, 256, shape, np.uint8), np.arange(examples) % 64)
        for n in range(SHARE)
    ]


def _units(name: str, backend: Literal["tensorflow", "jax"]) -> tuple[Any, list[Any]]:
    from fedemb.config import ModelConfig, TrainingConfig, UnitGradientConfig
    from fedemb.engine.backend_rounds import build_rounds
    from fedemb.engine.rounds import ClientExamples
    from fedemb.models.backbones import build_backbone

    count, views = UNITS[name]
    model = ModelConfig(
        backbone="resnet8",
        image_size=32,
        channels=3,
        embedding_dim=64,
        classes=tuple("abcdefghij"),
        projection=False,
    )
    unit = UnitGradientConfig(
        microbatch=min(64, count), views=views, flip=views > 1, crop_padding=4 * (views > 1)
    )
    training = TrainingConfig(backend=backend, algorithm="dp_sgd", unit_gradient=unit)
    function, _ = build_rounds(build_backbone(model, 0), _mechanism(), model, training, workers=1)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, 1, 32, 32, 3), np.uint8)
    return function, [
        ClientExamples(0, n, image, random.integers(0, 10, 1)) for n, image in enumerate(images)
    ]


def _mechanism() -> Any:
    from fedemb.privacy.registry import MECHANISMS
    from fedemb.privacy.running import build_mechanism
    from studies.shared import Cohort

    cohort = Cohort(
        population=16, users_per_client=2, clients_per_round=4, noise_multiplier=1.0, rounds=10
    )
    return build_mechanism(
        cohort.plan(next(iter(MECHANISMS.values()))), bytes(32), "bench", 1, "0" * 64
    )


def _work(name: str, backend: Literal["tensorflow", "jax"]) -> Callable[[], None]:
    from fedemb.models.keras_backend import use_backend

    use_backend(backend)
    if backend == "tensorflow":
        from fedemb.models.keras_backend import configure_threads

        configure_threads(1)
    function, units = (_clients if name in CLIENTS else _units)(name, backend)
    weights = function.initial_weights()
    slabs = list(function.slabs(units, 0))

    def act() -> None:
        function.run(weights, slabs)

    return act


def _serve(name: str, backend: Literal["tensorflow", "jax"]) -> None:
    """A process of one backend: a round for each line it reads, its processor seconds in answer."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    act = _work(name, backend)
    started = time.process_time()
    act()  # compiles, and is probe_units
    sys.stdout.write(f"ready {time.process_time() - started}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        started = time.process_time()
        act()
        sys.stdout.write(f"done {time.process_time() - started}\n")
        sys.stdout.flush()


def _said(process: Any, word: str) -> float:
    for line in process.stdout:
        if line.startswith(word):
            return float(line.split()[1])
    raise RuntimeError(f"a process ended before it was {word}")


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Rounds of both backends, in turn."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "tests.benchmarks.bench_backends", "--serve", name]
    processes = [subprocess.Popen([*command, backend], **pipes) for backend in BACKENDS]
    try:
        first = [_said(process, "ready") for process in processes]
        seconds: list[list[float]] = []
        for _ in range(pairs):
            pair = []
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
                pair.append(_said(process, "done"))
            seconds.append(pair)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ratios = [jax / tensorflow for tensorflow, jax in seconds]
    return {
        "work": name,
        "ratio": statistics.median(ratios),
        "extremes": [min(ratios), max(ratios)],
        "seconds": seconds,
        "first_round_seconds": dict(zip(BACKENDS, first, strict=True)),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default=",".join([*CLIENTS, *UNITS]))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(*options.serve)
        return
    found = []
    for name in options.works.split(","):
        found.append(measure(name, options.pairs))
        row = found[-1]
        low, high = row["extremes"]
        print(f"{name:11} JAX / TensorFlow {row['ratio']:.2f} [{low:.2f}, {high:.2f}]", flush=True)  # noqa: T201
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
