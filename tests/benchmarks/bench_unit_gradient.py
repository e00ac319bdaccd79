"""`make bench`, W3: the clipped sum of DP-SGD against the plain step on the same tensors.

    python -m tests.benchmarks.bench_unit_gradient [--cores 1,2] [--pairs 7] [--json PATH]
    python -m tests.benchmarks.bench_unit_gradient --cases memory

`memory` is what a process of its own grows by, on one core, once net and images stand: the plain
step at 256 images, and ours at 256 to 16,384 units with micro-batches of 16.

ResNet-8 with GroupNorm, 32x32x3, 256 images a step, every image a unit; 16 views of each of 32
images, against a plain step on the same 512 views; and a linear head of 10 classes on 4,096 vectors
of 768 features, against a plain step in float32. Ours is the whole round: gradients, clip, exact
sum, noise. Both sides run in turn in one process; ratios are of processor seconds, which a busy
machine disturbs least, with wall clock beside them. On two cores processor seconds overstate ours:
its micro-batches share nothing, while the plain step waits for itself.
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
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.tiny import TINY

BATCH, CLASSES, VIEWS = (8 if TINY else 256), 10, 16
HEAD_BATCH, FEATURES = (64 if TINY else 4096), 768
VIEWED = 2 if TINY else 32
"""Images of a step with many views."""
GOALS = {("views1", 2): 1.30, ("views1", 1): 1.45, ("views16", 2): 1.15, ("views16", 1): 1.15}
GOALS |= {("head", 2): 1.1, ("head", 1): 1.1}
RATE = 0.02


def _mechanism(rounds: int = 1000) -> Any:
    from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
    from fedemb.privacy.running import build_mechanism

    plan = GroupPoissonGaussian(
        rounds=rounds,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        virtual_clients=10 * BATCH,
        groupings=1,
        sampling_probability=0.1,
    )
    return build_mechanism(plan, bytes(32), "bench", 1, "0" * 64)


class NetBench:
    """ResNet-8, all weights."""

    def __init__(self, cores: int, *, units: int, views: int, microbatch: int) -> None:
        from fedemb.config import ModelConfig, UnitGradientConfig
        from fedemb.engine import ClientExamples, build_backbone
        from fedemb.engine.units import UnitGradientFunction
        from fedemb.models.keras_backend import configure_threads

        workers = configure_threads(cores)
        model = ModelConfig(
            backbone="resnet8", image_size=32, channels=3, embedding_dim=64, projection=False
        )
        self.build = lambda: build_backbone(model, 0)
        named = {"classes": tuple(map(str, range(CLASSES))), "head_init": "glorot"}
        classifier = build_backbone(model.model_copy(update=named), 0)
        random = np.random.default_rng(0)
        self.images = random.integers(0, 256, (units, 32, 32, 3), np.uint8)
        self.labels = random.integers(0, CLASSES, units)
        self.mechanism = _mechanism()
        config = UnitGradientConfig(
            microbatch=microbatch, views=views, flip=views > 1, crop_padding=4 * (views > 1)
        )
        self.function = UnitGradientFunction(
            classifier,
            self.mechanism,
            config,
            variables=classifier.trainable_variables,
            workers=workers,
        )
        self.cores, self.views = cores, views
        self.units = [
            ClientExamples(0, number, image[None], label[None])
            for number, (image, label) in enumerate(zip(self.images, self.labels, strict=True))
        ]
        self.weights = self.function.initial_weights()

    def ours(self) -> None:
        sums = self.function(self.weights, self.units, 0)
        self.mechanism.aggregate(0, sums.total)

    def plain(self) -> Callable[[], None]:
        from tests.benchmarks.plain_loop import PlainLoop

        images = np.repeat(self.images, self.views, axis=0)[None]
        labels = np.repeat(self.labels, self.views)[None]
        return PlainLoop(
            self.build,
            images,
            labels,
            rows=CLASSES,
            batch_size=images.shape[1],
            epochs=1,
            rate=RATE,
            threads=self.cores,
        )


class HeadBench:
    """A linear head on features that are known."""

    def __init__(self, cores: int) -> None:
        import keras

        from fedemb.config import UnitGradientConfig
        from fedemb.engine.feature_cache import rows_of
        from fedemb.engine.heads import HeadGradientFunction
        from fedemb.models.backbones import HEAD
        from fedemb.models.keras_backend import configure_threads

        configure_threads(cores)
        random = np.random.default_rng(0)
        self.features = random.normal(size=(HEAD_BATCH, FEATURES)).astype(np.float32)
        self.labels = random.integers(0, CLASSES, HEAD_BATCH)
        inputs = keras.Input((FEATURES,))
        head = keras.layers.Dense(CLASSES, name=HEAD)
        self.mechanism = _mechanism()
        self.function = HeadGradientFunction(
            keras.Model(inputs, head(inputs)), self.mechanism, UnitGradientConfig()
        )
        rows = rows_of(self.features, self.labels)
        self.units = [rows[place : place + 1] for place in range(HEAD_BATCH)]
        self.weights = self.function.initial_weights()

    def ours(self) -> None:
        sums = self.function(self.weights, self.units, 0)
        self.mechanism.aggregate(0, sums.total)

    def plain(self) -> Callable[[], None]:
        import tensorflow as tf

        features, labels = tf.constant(self.features), tf.constant(self.labels)
        kernel = tf.Variable(tf.zeros((FEATURES, CLASSES)))
        bias = tf.Variable(tf.zeros((CLASSES,)))

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                logits = tf.matmul(features, kernel) + bias
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses)
            for variable, gradient in zip(
                (kernel, bias), tape.gradient(loss, (kernel, bias)), strict=True
            ):
                variable.assign_sub(RATE * gradient)

        return step


def _peak() -> float:
    """Megabytes this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _memory() -> dict[str, float]:
    """What each grows by."""
    grown = {}
    for measure, units in (
        ("plain", BATCH),
        *(("ours", BATCH * 4**power) for power in range(2 if TINY else 4)),
    ):
        found = _spawn(f"memory{units}", 1, measure, 1, 16)
        grown[f"{measure} {units}"] = found["megabytes"]
        _say(f"memory {measure} batch={units} grows by {found['megabytes']:.0f} MB")
    return grown


def _clock(act: Callable[[], Any]) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - cpu


def _bench(case: str, cores: int, microbatch: int) -> Any:
    if case == "head":
        return HeadBench(cores)
    if case.startswith("memory"):
        return NetBench(cores, units=int(case.removeprefix("memory")), views=1, microbatch=16)
    if case == "views16":
        return NetBench(cores, units=VIEWED, views=VIEWS, microbatch=min(microbatch, 8, VIEWED))
    return NetBench(cores, units=BATCH, views=1, microbatch=min(microbatch, BATCH))


def _child(arguments: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.child_cores])
    # Each session its own threads: the plain step uses all cores, a micro-batch of ours one.
    os.environ["TF_OVERRIDE_GLOBAL_THREADPOOL"] = "1"
    bench = _bench(arguments.case, arguments.child_cores, arguments.microbatch)
    if arguments.measure != "time":
        before = _peak()
        act = bench.ours if arguments.measure == "ours" else bench.plain()
        for _ in range(2):
            act()
        return {"megabytes": _peak() - before}
    plain = bench.plain()
    bench.ours()
    plain()
    rows = []
    for pair in range(arguments.pairs):
        order = ("ours", "plain") if pair % 2 else ("plain", "ours")
        rows.append({name: _clock(bench.ours if name == "ours" else plain) for name in order})
    wall, cpu = (
        np.array([[row["ours"][kind], row["plain"][kind]] for row in rows]) for kind in (0, 1)
    )
    ratios = cpu[:, 0] / cpu[:, 1]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return {
        "cpu_ratio": float(middle),
        "cpu_ratio_quartiles": [float(low), float(high)],
        "wall_ratio": float(np.median(wall[:, 0] / wall[:, 1])),
        "wall_ratio_of_fastest": float(wall[:, 0].min() / wall[:, 1].min()),
        "ours_cpu_seconds": float(np.median(cpu[:, 0])),
        "plain_cpu_seconds": float(np.median(cpu[:, 1])),
    }


def _spawn(case: str, cores: int, measure: str, pairs: int, microbatch: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_unit_gradient", "--case", case]
    command += ["--child-cores", str(cores), "--measure", measure, "--pairs", str(pairs)]
    command += ["--microbatch", str(microbatch)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cores", default="")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--cases", default="views1,views16,head,memory")
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    for hidden in ("--case", "--measure"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--child-cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        _say(json.dumps(_child(arguments)))
        return
    available = len(os.sched_getaffinity(0))
    cores = [int(n) for n in arguments.cores.split(",")] if arguments.cores else [1, available]
    results: dict[str, Any] = {"available_cores": available}
    cases = arguments.cases.split(",")
    if "memory" in cases:
        cases.remove("memory")
        results["memory"] = _memory()
    for case in cases:
        for count in sorted(set(cores)):
            found = _spawn(case, count, "time", arguments.pairs, arguments.microbatch)
            goal = GOALS.get((case, count))
            results[f"{case} cores={count}"] = {**found, "goal": goal}
            name = "W3" if case == "views1" else f"W3 {case}"
            low, high = found["cpu_ratio_quartiles"]
            _say(f"{name} cores={count} ours/plain {found['cpu_ratio']:.2f}")
            _say(
                f"  processor seconds {found['ours_cpu_seconds']:.3f} / "
                f"{found['plain_cpu_seconds']:.3f}, quartiles {low:.2f} to {high:.2f}, wall clock "
                f"{found['wall_ratio']:.2f}, fastest {found['wall_ratio_of_fastest']:.2f}, goal "
                f"{goal or 'none'}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
