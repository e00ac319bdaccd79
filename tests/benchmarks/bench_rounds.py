"""`make bench`: private rounds against plain, non-private steps on the same tensors.

    python -m tests.benchmarks.bench_rounds [--works W1,W2,...] [--cores 1,2] [--pairs 9] [--json F]

Both sides run in turn in one process, so that a busy machine hits both; the ratio of each pair is
taken, then the median and the quartiles over pairs. Every process measures one work on a given
number of cores (its affinity is cut before TensorFlow starts). Ours is the whole round: training or
gradients, clip, exact sum, noise. Results of earlier attempts: README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.tiny import TINY
from tests.kit.process import python

Act = Callable[[], object]
CLASSES, FEATURES, RATE = 10, 768, 0.02


def _mechanism(clients: int) -> Any:
    from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
    from fedemb.privacy.running import build_mechanism

    plan = GroupPoissonGaussian(
        rounds=1000,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        virtual_clients=clients,
        groupings=1,
        sampling_probability=0.1,
    )
    return build_mechanism(plan, bytes(32), "bench", 1, "0" * 64)


def _round(function: Any, mechanism: Any, units: Any) -> Act:
    weights = function.initial_weights()
    return lambda: mechanism.aggregate(0, function(weights, units, 0).total)


@dataclass(frozen=True)
class Clients:
    """One round of virtual clients of equal size."""

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

    def sides(self, cores: int) -> tuple[Act, Callable[[], Act]]:
        """A round of ours, and what makes the plain loop."""
        import fedemb
        from fedemb.models.backbones import with_bfloat16
        from tests.benchmarks.plain_loop import PlainLoop

        workers = fedemb.configure_threads(cores)
        model = fedemb.ModelConfig(
            backbone=self.backbone, image_size=self.size, channels=self.channels
        )
        random = np.random.default_rng(0)
        shape = (self.clients, self.examples, self.size, self.size, self.channels)
        images = random.integers(0, 256, shape, np.uint8)
        rows = np.arange(self.examples) % self.rows
        labels = np.stack([random.permutation(rows) for _ in range(self.clients)])
        local = fedemb.LocalTrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            max_examples_per_client=self.examples,
            client_learning_rate=RATE,
            client_momentum=0.0,
            head_learning_rate_scale=1.0,
            loss=fedemb.LossConfig(kind="softmax"),
        )
        mechanism, backbone = _mechanism(10 * self.clients), fedemb.build_backbone(model, 0)
        backbone = with_bfloat16(backbone) if self.bfloat16 else backbone
        function = fedemb.RoundFunction(backbone, mechanism, local, workers=workers)
        clients = [
            fedemb.ClientExamples(0, group, *arrays)
            for group, arrays in enumerate(zip(images, labels, strict=True))
        ]
        how = {"rows": self.rows, "batch_size": self.batch_size, "epochs": self.epochs}
        return _round(function, mechanism, clients), lambda: PlainLoop(
            lambda: fedemb.build_backbone(model, 0), images, labels, **how, rate=RATE, threads=cores
        )


@dataclass(frozen=True)
class Units:
    """A step of DP-SGD: ResNet-8 with GroupNorm, every image of 32x32x3 a unit."""

    units: int
    views: int = 1
    microbatch: int = 64

    def sides(self, cores: int) -> tuple[Act, Callable[[], Act]]:
        """A round of ours, and what makes the plain step on the same views."""
        from fedemb.config import ModelConfig, UnitGradientConfig
        from fedemb.models.backbones import build_backbone
        from fedemb.models.keras_backend import configure_threads
        from fedemb.training.rounds import ClientExamples
        from fedemb.training.units import UnitGradientFunction
        from tests.benchmarks.plain_loop import PlainLoop

        workers = configure_threads(cores)
        model = ModelConfig(
            backbone="resnet8", image_size=32, channels=3, embedding_dim=64, projection=False
        )
        named = {"classes": tuple(map(str, range(CLASSES))), "head_init": "glorot"}
        classifier = build_backbone(model.model_copy(update=named), 0)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (self.units, 32, 32, 3), np.uint8)
        labels = random.integers(0, CLASSES, self.units)
        config = UnitGradientConfig(
            microbatch=min(self.microbatch, self.units),
            views=self.views,
            flip=self.views > 1,
            crop_padding=4 * (self.views > 1),
        )
        mechanism, variables = _mechanism(10 * self.units), classifier.trainable_variables
        function = UnitGradientFunction(
            classifier, mechanism, config, variables=variables, workers=workers
        )
        units = [
            ClientExamples(0, number, image[None], label[None])
            for number, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        all_views = (np.repeat(part, self.views, axis=0)[None] for part in (images, labels))
        return _round(function, mechanism, units), lambda: PlainLoop(
            lambda: build_backbone(model, 0),
            *all_views,
            rows=CLASSES,
            batch_size=self.units * self.views,
            epochs=1,
            rate=RATE,
            threads=cores,
        )


@dataclass(frozen=True)
class Head:
    """A linear head of 10 classes on features that are known."""

    units: int

    def sides(self, cores: int) -> tuple[Act, Callable[[], Act]]:
        """A round of ours, and what makes the plain step in float32."""
        import keras
        import tensorflow as tf

        from fedemb.config import UnitGradientConfig
        from fedemb.models.backbones import HEAD
        from fedemb.models.keras_backend import configure_threads
        from fedemb.training.feature_cache import rows_of
        from fedemb.training.heads import HeadGradientFunction

        configure_threads(cores)
        random = np.random.default_rng(0)
        features = random.normal(size=(self.units, FEATURES)).astype(np.float32)
        labels = random.integers(0, CLASSES, self.units)
        inputs = keras.Input((FEATURES,))
        net = keras.Model(inputs, keras.layers.Dense(CLASSES, name=HEAD)(inputs))
        mechanism, rows = _mechanism(10 * self.units), rows_of(features, labels)
        function = HeadGradientFunction(net, mechanism, UnitGradientConfig())
        units = [rows[place : place + 1] for place in range(self.units)]

        kernel, bias = tf.Variable(tf.zeros((FEATURES, CLASSES))), tf.Variable(tf.zeros((CLASSES,)))
        fixed, wanted = tf.constant(features), tf.constant(labels)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                logits = tf.matmul(fixed, kernel) + bias
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, logits)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, (kernel, bias))
            for variable, gradient in zip((kernel, bias), gradients, strict=True):
                variable.assign_sub(RATE * gradient)

        return _round(function, mechanism, units), lambda: step


W1 = Clients("lenet", 28, 1, clients=16, examples=128, batch_size=32, epochs=4)
WORKS: dict[str, Clients | Units | Head] = {
    "W1": W1,
    "W2": Clients("resnet8", 32, 3, clients=8, examples=64, batch_size=16, epochs=1),
    "W3": Units(256),
    "W3-views16": Units(32, views=16, microbatch=8),
    "head": Head(4096),
    # For processors with bfloat16 instructions: what training.mixed_precision gives there.
    "W1-bf16": replace(W1, bfloat16=True),
    # The quickstart's round: small steps, where the cost of an operation is its overhead.
    "Q": Clients("tiny", 28, 1, clients=90, examples=128, batch_size=32, epochs=1, rows=32),
}
if TINY:
    small = Clients("tiny", 12, 1, clients=2, examples=8, batch_size=4, epochs=1, rows=8)
    WORKS = {"W1": small, "W3-views16": Units(2, 16, 2), "head": Head(64)}
USUAL = [name for name in WORKS if name not in ("W1-bf16", "Q")]
GOALS = {("W1", 2): 0.80, ("W1", 1): 1.02, ("W2", 1): 1.03, ("W3", 2): 1.30, ("W3", 1): 1.45}
GOALS |= dict.fromkeys([("W3-views16", 1), ("W3-views16", 2)], 1.15)
GOALS |= dict.fromkeys([("head", 1), ("head", 2)], 1.1)
"""Work and cores -> largest ratio: of seconds for virtual clients, else of processor seconds."""


def _clock(act: Act) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - cpu


def _child(name: str, cores: int, pairs: int) -> dict[str, Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    # Each session its own threads: the plain side uses all cores, a client of ours one.
    os.environ["TF_OVERRIDE_GLOBAL_THREADPOOL"] = "1"
    ours, make_plain = WORKS[name].sides(cores)
    plain, first = make_plain(), _clock(ours)[0]
    plain()
    rows = []
    for pair in range(pairs):
        order = (ours, plain) if pair % 2 else (plain, ours)
        found = {act: _clock(act) for act in order}
        rows.append([found[ours], found[plain]])
    table = np.array(rows)  # pairs, sides, kinds of seconds
    ratios = table[:, 0] / table[:, 1]
    wall, cpu = (np.quantile(ratios[:, kind], [0.25, 0.5, 0.75]).tolist() for kind in (0, 1))
    seconds = np.median(table[..., 0], axis=0).tolist()
    return {"ratio": wall, "cpu_ratio": cpu, "seconds": seconds, "first_round_seconds": first}


def _spawn(name: str, cores: int, pairs: int) -> dict[str, Any]:
    words = ("--pairs", pairs, "--child", name, "--cores", cores)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    said = python("-m", "tests.benchmarks.bench_rounds", *words, env=environment, timeout=36_000)
    return json.loads(said.strip().splitlines()[-1])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    available = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--works", default=",".join(USUAL))
    parser.add_argument("--cores", default=f"1,{available}")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    cores = sorted({int(number) for number in asked.cores.split(",")})
    if asked.child:
        _say(json.dumps(_child(asked.child, cores[0], asked.pairs)))
        return
    results: dict[str, Any] = {"available_cores": available}
    for name in asked.works.split(","):
        for count in cores:
            found = _spawn(name, count, asked.pairs)
            goal = GOALS.get((name, count))
            results[f"{name} cores={count}"] = {**found, "goal": goal}
            kinds = {"seconds": found["ratio"], "processor seconds": found["cpu_ratio"]}
            ratios = (f"{kind} {m:.2f} [{a:.2f}, {b:.2f}]" for kind, (a, m, b) in kinds.items())
            _say(f"{name} cores={count}: {', '.join(ratios)} of plain, goal {goal or 'none'}")
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
