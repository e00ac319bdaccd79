"""`make bench`: private rounds against plain, non-private steps on the same tensors.

    python -m tests.benchmarks.bench_rounds [--works W1,W2] [--cores 1,2] [--turns 9] [--peers ...]

Ours, the plain loop and other libraries are processes that act in turn, so that a busy machine hits
all; the ratio to the plain loop is taken within a turn, then the median and the quartiles. Their
affinity is cut before TensorFlow starts. Ours is the whole round: training or gradients, clip,
exact sum, noise. `make bench-peers` installs the other libraries from `locks/` first. Results of
earlier attempts: README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.peers import CLASSES, NAMES, NET, PEERS, RATE
from tests.benchmarks.plain_loop import plain_loop
from tests.benchmarks.tiny import TINY

Act = Callable[[], object]
FEATURES = 768
ROOT = Path(__file__).parents[2]


def _threads(cores: int, *, plain: bool) -> int:
    """Gives the plain side's operations all cores, a client of ours one; returns our workers."""
    import tensorflow as tf

    from fedemb.models.keras_backend import configure_threads

    if not plain:
        return configure_threads(cores)
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return 1


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

    def act(self, cores: int, *, plain: bool) -> Act:
        """Returns a round of ours, or the plain loop."""
        import fedemb
        from fedemb.models.backbones import with_bfloat16

        workers = _threads(cores, plain=plain)
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
        if plain:
            how = {"rows": self.rows, "batch_size": self.batch_size, "epochs": self.epochs}
            return plain_loop(backbone, images, labels, **how, rate=RATE)
        backbone = with_bfloat16(backbone) if self.bfloat16 else backbone
        function = fedemb.RoundFunction(backbone, mechanism, local, workers=workers)
        clients = [fedemb.ClientExamples(0, g, images[g], labels[g]) for g in range(self.clients)]
        return _round(function, mechanism, clients)


@dataclass(frozen=True)
class Units:
    """A step of DP-SGD: ResNet-8 with GroupNorm, every image of 32x32x3 a unit."""

    units: int
    views: int = 1
    microbatch: int = 64

    def act(self, cores: int, *, plain: bool) -> Act:
        """Returns a round of ours, or the plain step on the same views."""
        from fedemb.config import ModelConfig, UnitGradientConfig
        from fedemb.models.backbones import build_backbone
        from fedemb.training.rounds import ClientExamples
        from fedemb.training.units import UnitGradientFunction

        workers = _threads(cores, plain=plain)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (self.units, 32, 32, 3), np.uint8)
        labels = random.integers(0, CLASSES, self.units)
        if plain:
            views = [np.repeat(part, self.views, axis=0)[None] for part in (images, labels)]
            how = {"rows": CLASSES, "batch_size": self.units * self.views, "epochs": 1}
            return plain_loop(build_backbone(ModelConfig(**NET), 0), *views, **how, rate=RATE)
        classifier = build_backbone(ModelConfig(**NET, classes=NAMES, head_init="glorot"), 0)
        config = UnitGradientConfig(
            microbatch=min(self.microbatch, self.units),
            views=self.views,
            flip=self.views > 1,
            crop_padding=4 * (self.views > 1),
        )
        how = {"variables": classifier.trainable_variables, "workers": workers}
        mechanism = _mechanism(10 * self.units)
        function = UnitGradientFunction(classifier, mechanism, config, **how)
        units = [ClientExamples(0, n, images[[n]], labels[[n]]) for n in range(self.units)]
        return _round(function, mechanism, units)


@dataclass(frozen=True)
class Head:
    """A linear head of 10 classes on features that are known."""

    units: int

    def act(self, cores: int, *, plain: bool) -> Act:
        """Returns a round of ours, or the plain step in float32."""
        import keras
        import tensorflow as tf

        from fedemb.config import UnitGradientConfig
        from fedemb.models.backbones import HEAD
        from fedemb.training.feature_cache import rows_of
        from fedemb.training.heads import HeadGradientFunction

        _threads(cores, plain=plain)
        random = np.random.default_rng(0)
        features = random.normal(size=(self.units, FEATURES)).astype(np.float32)
        labels = random.integers(0, CLASSES, self.units)
        if not plain:
            head = keras.layers.Dense(CLASSES, name=HEAD)
            net = keras.Sequential([keras.Input((FEATURES,)), head])
            mechanism, rows = _mechanism(10 * self.units), rows_of(features, labels)
            function = HeadGradientFunction(net, mechanism, UnitGradientConfig())
            units = [rows[[n]] for n in range(self.units)]
            return _round(function, mechanism, units)
        kernel, bias = tf.Variable(tf.zeros((FEATURES, CLASSES))), tf.Variable(tf.zeros((CLASSES,)))
        fixed, wanted = tf.constant(features), tf.one_hot(labels, CLASSES)

        @tf.function
        def step() -> None:
            errors = (tf.nn.softmax(tf.matmul(fixed, kernel) + bias) - wanted) * RATE / self.units
            kernel.assign_sub(tf.matmul(fixed, errors, transpose_a=True))
            bias.assign_sub(tf.reduce_sum(errors, 0))

        return step


W1 = Clients("lenet", 28, 1, clients=16, examples=128, batch_size=32, epochs=4)
WORKS: dict[str, Clients | Units | Head] = {
    "W1": W1,
    "W2": Clients("resnet8", 32, 3, clients=8, examples=64, batch_size=16, epochs=1),
    "W3": Units(256),
    "W3-views16": Units(32, views=16, microbatch=8),
    "head": Head(4096),
    # For processors with bfloat16 instructions: what training.mixed_precision gives there.
    "W1-bf16": replace(W1, bfloat16=True),
}
if TINY:
    small = Clients("tiny", 12, 1, clients=2, examples=8, batch_size=4, epochs=1, rows=8)
    WORKS = {"W1": small, "W3": Units(2, 16, 2), "head": Head(64)}


def _start(name: str, work: str, cores: int) -> subprocess.Popen[str]:
    """Starts a process that acts in its turns."""
    lock = PEERS[name][1] if name in PEERS else ""
    python = ROOT / f".venv-peers-{lock}/bin/python" if lock else sys.executable
    words = ("-m", "tests.benchmarks.bench_rounds", "--side", name, "--works", work)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    how |= {"cwd": ROOT, "env": os.environ | quiet, "start_new_session": True}
    return subprocess.Popen([str(python), *words, "--cores", str(cores)], **how)


def _turn(side: Any) -> list[float]:
    """Lets a process act once; returns seconds and processor seconds."""
    side.stdin.write("\n")
    side.stdin.flush()
    found = next((line for line in side.stdout if line.startswith("seconds ")), "")
    assert found, f"{side.args} ended"
    return [float(word) for word in found.split()[1:]]


def _serve(act: Act) -> None:
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        act()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        sys.stdout.write(f"\nseconds {wall} {cpu}\n")
        sys.stdout.flush()


def _compare(work: str, names: list[str], cores: int, turns: int) -> None:
    sides = [_start(name, work, cores) for name in names]
    # The first two turns compile.
    table = np.array([[_turn(side) for side in sides] for _ in range(turns + 2)])[2:]
    for place, name in enumerate(names[1:], 1):
        quartiles = np.quantile(table[:, place] / table[:, 0], [0.25, 0.5, 0.75], axis=0)
        wall, cpu = (f"{m:.2f} [{a:.2f}, {b:.2f}]" for a, m, b in quartiles.T)
        sys.stdout.write(f"{work} cores={cores}: {name} {wall} of plain, processor {cpu}\n")
    sys.stdout.flush()
    for side in sides:  # a library starts processes of its own
        os.killpg(side.pid, signal.SIGKILL)


def main() -> None:
    """See the module."""
    available = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--works", default=",".join(name for name in WORKS if name != "W1-bf16"))
    parser.add_argument("--cores", default=f"1,{len(available)}")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--peers", default="", help=f"Other libraries too: {','.join(PEERS)}.")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for work in asked.works.split(","):
        for cores in sorted(map(int, asked.cores.split(","))):
            os.sched_setaffinity(0, available[:cores])
            if asked.side in PEERS:
                _serve(PEERS[asked.side][2]())
            elif asked.side:
                _serve(WORKS[work].act(cores, plain=asked.side == "plain"))
            else:
                peers = [name for name in asked.peers.split(",") if name and PEERS[name][0] == work]
                _compare(work, ["plain", "fedemb", *peers], cores, asked.turns)


if __name__ == "__main__":
    main()
