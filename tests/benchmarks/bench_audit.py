"""Processor time and memory of a training with the audit of its mechanism and without.

`python -m tests.benchmarks.bench_audit` prints both for trainings of the quickstart's size and of
450,000 parameters. Each runs in a process of its own; time is compared inside one, since processor
seconds of two depend on what else the machine does.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.tiny import TINY

LOCAL = {
    "epochs": 3,
    "batch_size": 32,
    "max_examples_per_client": 128,
    "head_init": "prototypes",
}
QUICKSTART = {
    "model": {"backbone": "tiny", "embedding_dim": 32, "image_size": 28},
    "partition": {"virtual_clients": 90},
    "mechanism": {
        "kind": "group_poisson_gaussian",
        "rounds": 30,
        "sampling_probability": 0.1,
        "noise_multiplier": 0.83,
    },
    "training.local": LOCAL,
    "training.server": {"learning_rate": 0.7, "momentum": 0.9, "ema_decay": 0.8},
}
SIZES: dict[str, dict[str, Any]] = {
    "quickstart, a tenth of its users": QUICKSTART,
    "450,000 parameters, 100 rounds": {
        **QUICKSTART,
        "model": {"backbone": "lenet", "embedding_dim": 128, "image_size": 28},
        "mechanism": {**QUICKSTART["mechanism"], "rounds": 100},
    },
}


if TINY:
    SIZES = {
        name: {
            **size,
            "model": QUICKSTART["model"],
            "mechanism": {**size["mechanism"], "rounds": 2},
        }
        for name, size in SIZES.items()
    }


def measure(name: str, audited: bool) -> dict[str, float]:
    """Trains in this process; processor seconds and peak memory of the training.

    The audit's seconds are taken inside the same training: those of every round, and those of the
    rounds that are run again at its end.
    """
    from fedemb.training import trainer
    from tests.kit.pipeline_runs.training_run import Unaudited, config, prepare

    seconds: dict[str, float] = {"every_round": 0.0, "at_the_end": 0.0}

    def timed(method: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments)
            finally:
                seconds[where] += time.process_time() - began

        return call

    with tempfile.TemporaryDirectory() as folder:
        run = prepare(Path(folder) / "run", config(**SIZES[name]), users=90 * 32)
        audit = trainer.RoundAudit
        if not audited:
            trainer.RoundAudit = Unaudited
        for method, where in (
            ("add", "every_round"),
            ("save", "every_round"),
            ("replay", "at_the_end"),
            ("found", "at_the_end"),
        ):
            setattr(audit, method, timed(getattr(audit, method), where))
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        card = run.train()
        whole = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        parameters = sum(math.prod(tensor["shape"]) for tensor in card["tensors"])
    return {
        **seconds,
        "training": whole - sum(seconds.values()),
        "megabytes": (peak - before.ru_maxrss) / 1024,
        "parameters": parameters,
    }


def main() -> None:
    """Prints a line for each size."""
    for name in SIZES:
        with_it, without = (
            json.loads(
                subprocess.run(
                    [sys.executable, "-m", "tests.benchmarks.bench_audit", name, str(audited)],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout.splitlines()[-1]
            )
            for audited in (True, False)
        )
        training = with_it["training"]
        sys.stdout.write(
            f"{name} ({with_it['parameters']:,} parameters): {training:.0f} s of training, "
            f"{with_it['every_round'] / training:+.1%} in its rounds and "
            f"{with_it['at_the_end'] / training:+.1%} at its end; "
            f"{without['megabytes']:.0f} MB without, {with_it['megabytes']:.0f} MB with\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        sys.stdout.write(json.dumps(measure(sys.argv[1], sys.argv[2] == "True")) + "\n")
