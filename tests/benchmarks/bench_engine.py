"""`make bench`: a round of the engine against the plain loop on the same tensors.

    python -m tests.benchmarks.bench_engine [--workloads W1,W2,Q] [--cores 1,2] [--json PATH]

Both loops run in turn in one process, so that a busy machine hits both; the ratio of each pair is
taken, then the median and the quartiles over pairs. Every process measures one workload on a given
number of cores (its affinity is cut before TensorFlow starts). Memory is the high-water mark of a
process of its own. Plain lines for people, JSON for machines. Results of earlier attempts:
README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.tiny import TINY


@dataclass(frozen=True)
class Workload:
    """One round: virtual clients of equal size."""

    backbone: str
    size: int
    channels: int
    clients: int
    examples: int
    batch_size: int
    epochs: int
    rows: int = 64
    bfloat16: bool = False
    """Ours alone; the plain loop stays in float32."""


WORKLOADS = {
    "W1": Workload("lenet", 28, 1, clients=16, examples=128, batch_size=32, epochs=4),
    "W2": Workload("resnet8", 32, 3, clients=8, examples=64, batch_size=16, epochs=1),
    # For processors with bfloat16 instructions: what training.mixed_precision gives there.
    "W1-bf16": Workload(
        "lenet", 28, 1, clients=16, examples=128, batch_size=32, epochs=4, bfloat16=True
    ),
    # The quickstart's round: small steps, where the cost of an operation is its overhead.
    "Q": Workload("tiny", 28, 1, clients=90, examples=128, batch_size=32, epochs=1, rows=32),
}
if TINY:
    small = Workload("tiny", 12, 1, clients=2, examples=8, batch_size=4, epochs=1, rows=8)
    WORKLOADS = dict.fromkeys(WORKLOADS, small)
GOALS = {("W1", 2): 0.80, ("W1", 1): 1.02, ("W2", 1): 1.03}
RATE = 0.02


class Bench:
    """The engine and the plain loop on one workload."""

    def __init__(self, workload: Workload, cores: int) -> None:
        import fedemb
        from fedemb.models.backbones import with_bfloat16

        workers = fedemb.configure_threads(cores)
        self.workload, self.cores = workload, cores
        model = fedemb.ModelConfig(
            backbone=workload.backbone, image_size=workload.size, channels=workload.channels
        )
        self.build = lambda: fedemb.build_backbone(model, 0)
        random = np.random.default_rng(0)
        shape = (workload.clients, workload.examples, workload.size, workload.size)
        self.images = random.integers(0, 256, (*shape, workload.channels), np.uint8)
        rows = np.arange(workload.examples) % workload.rows
        self.labels = np.stack([random.permutation(rows) for _ in range(workload.clients)])
        mechanism = fedemb.GroupPoissonGaussianConfig(
            kind="group_poisson_gaussian",
            rounds=1000,
            noise_multiplier=1.0,
            sampling_probability=0.1,
        )
        plan = fedemb.plan(mechanism, virtual_clients=10 * workload.clients)
        self.mechanism = fedemb.build_mechanism(plan, bytes(32), "bench", 1, "0" * 64)
        local = fedemb.LocalTrainingConfig(
            epochs=workload.epochs,
            batch_size=workload.batch_size,
            max_examples_per_client=workload.examples,
            client_learning_rate=RATE,
            client_momentum=0.0,
            head_learning_rate_scale=1.0,
            loss=fedemb.LossConfig(kind="softmax"),
        )
        backbone = with_bfloat16(self.build()) if workload.bfloat16 else self.build()
        self.function = fedemb.RoundFunction(backbone, self.mechanism, local, workers=workers)
        self.clients = [
            fedemb.ClientExamples(0, group, *arrays)
            for group, arrays in enumerate(zip(self.images, self.labels, strict=True))
        ]
        self.weights = self.function.initial_weights()
        self.noise_seconds = 0.0

    def ours(self) -> None:
        """One whole round: local training, clip, exact sum, noise."""
        sums = self.function(self.weights, self.clients, 0)
        start = time.perf_counter()
        self.mechanism.aggregate(0, sums.total)
        self.noise_seconds = time.perf_counter() - start

    def plain_loop(self) -> Any:
        """The plain loop on all cores."""
        from tests.benchmarks.plain_loop import PlainLoop

        return PlainLoop(
            self.build,
            self.images,
            self.labels,
            rows=self.workload.rows,
            batch_size=self.workload.batch_size,
            epochs=self.workload.epochs,
            rate=RATE,
            threads=self.cores,
        )

    def clip_seconds(self) -> float:
        """Clipping and summing all updates of a round, alone, on one core."""
        import tensorflow as tf

        update = [tf.random.stateless_normal(s, [1, 2]) for s in self.function.objective.shapes]

        @tf.function
        def add(state: Any, parts: Any) -> Any:
            return state + self.mechanism.record(parts)

        def all_clients() -> float:
            state = np.zeros(self.function.dim, np.int64)
            start = time.perf_counter()
            for _ in self.clients:
                state = add(state, update)
            return time.perf_counter() - start

        return min(all_clients() for _ in range(4))


def _clock(act: Callable[[], Any]) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - cpu


def _time(bench: Bench, pairs: int) -> dict[str, Any]:
    loop, start = bench.plain_loop(), time.perf_counter()
    bench.ours()
    first = time.perf_counter() - start
    loop()
    seconds: dict[str, list[float]] = {"ours": [], "loop": []}
    work: dict[str, list[float]] = {"ours": [], "loop": []}
    for pair in range(pairs):
        order = (("ours", bench.ours), ("loop", loop))
        for name, act in order if pair % 2 else order[::-1]:
            wall, cpu = _clock(act)
            seconds[name].append(wall)
            work[name].append(cpu)
    ours, plain = np.array(seconds["ours"]), np.array(seconds["loop"])
    low, middle, high = np.quantile(ours / plain, [0.25, 0.5, 0.75])
    overhead = bench.clip_seconds() / min(bench.cores, len(bench.clients)) + bench.noise_seconds
    return {
        "ratio": float(middle),
        "ratio_quartiles": [float(low), float(high)],
        "ratio_of_fastest": float(ours.min() / plain.min()),
        "cpu_ratio": float(np.median(work["ours"]) / np.median(work["loop"])),
        "ours_seconds": float(np.median(ours)),
        "loop_seconds": float(np.median(plain)),
        "first_round_seconds": first,
        "clip_sum_noise_share": float(overhead / np.median(ours)),
        "pairs": pairs,
    }


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _child(arguments: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.child_cores])
    # Each session its own threads: the plain loop uses all cores, a client of ours one.
    os.environ["TF_OVERRIDE_GLOBAL_THREADPOOL"] = "1"
    workload = Workload(**json.loads(arguments.child))
    bench = Bench(workload, arguments.child_cores)
    if arguments.measure == "time":
        return _time(bench, arguments.pairs)
    if arguments.measure == "start":
        bench.ours()
        ready = time.time() - arguments.started
        return {"seconds": ready - _clock(bench.ours)[0]}
    act = bench.ours if arguments.measure == "ours" else bench.plain_loop()
    for _ in range(2):
        act()
    return {"megabytes": _peak_megabytes()}


def _spawn(workload: Workload, cores: int, measure: str, pairs: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_engine"]
    command += ["--child", json.dumps(asdict(workload)), "--child-cores", str(cores)]
    command += ["--measure", measure, "--pairs", str(pairs), "--started", str(time.time())]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _memory(cores: int) -> dict[str, float]:
    base = WORKLOADS["W1"]
    # As many examples as rows; only the number of distinct labels changes.
    wide = replace(base, clients=4, examples=64 if TINY else 1024, epochs=1)
    peaks = {
        "loop": _spawn(base, cores, "loop")["megabytes"],
        "ours": _spawn(base, cores, "ours")["megabytes"],
        "ours_256_clients": _spawn(replace(base, clients=256), cores, "ours")["megabytes"],
        "rows_8": _spawn(replace(wide, rows=8), cores, "ours")["megabytes"],
        "rows_1024": _spawn(replace(wide, rows=1024), cores, "ours")["megabytes"],
    }
    # The workload's own images are made before the round and are not the engine's.
    images = 240 * base.examples * base.size**2 / 2**20
    peaks["growth_16_to_256_clients"] = peaks["ours_256_clients"] - peaks["ours"] - images
    peaks["growth_8_to_1024_rows"] = peaks["rows_1024"] - peaks["rows_8"]
    return peaks


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workloads", default="W1,W2")
    parser.add_argument("--cores", default="")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="three pairs, no memory")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    for hidden in ("--child", "--measure"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--child-cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _say(json.dumps(_child(arguments)))
        return
    available = len(os.sched_getaffinity(0))
    cores = [int(n) for n in arguments.cores.split(",")] if arguments.cores else [1, available]
    results: dict[str, Any] = {"available_cores": available, "workloads": {}}
    for name in arguments.workloads.split(","):
        for count in sorted(set(cores)):
            pairs = 3 if arguments.quick else arguments.pairs
            found = _spawn(WORKLOADS[name], count, "time", pairs)
            goal = GOALS.get((name, count))
            results["workloads"][f"{name} cores={count}"] = {**found, "goal": goal}
            low, high = found["ratio_quartiles"]
            _say(f"{name} cores={count} ours/L {found['ratio']:.2f}")
            _say(f"  processor seconds ours/L {found['cpu_ratio']:.2f}, goal {goal or 'none'}")
            _say(
                f"  quartiles {low:.2f} to {high:.2f}, fastest/fastest "
                f"{found['ratio_of_fastest']:.2f}; round "
                f"{found['ours_seconds']:.3f} s, L {found['loop_seconds']:.3f} s, clip + sum + "
                f"noise {found['clip_sum_noise_share']:.1%}, first round "
                f"{found['first_round_seconds']:.1f} s"
            )
    if not arguments.quick:
        results["memory_megabytes"] = memory = _memory(max(cores))
        _say(
            f"W1 peak memory: ours {memory['ours']:.0f} MB, L {memory['loop']:.0f} MB (ratio "
            f"{memory['ours'] / memory['loop']:.2f}, goal 1.05); 16 to 256 clients "
            f"{memory['growth_16_to_256_clients']:+.0f} MB, 8 to 1,024 head rows "
            f"{memory['growth_8_to_1024_rows']:+.0f} MB (goal 20 each)"
        )
        start = _spawn(WORKLOADS["W1"], max(cores), "start")["seconds"]
        results |= {"start_seconds": start}
        _say(f"process start to first round {start:.1f} s (goal 12)")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
