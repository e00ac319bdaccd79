"""What the privacy mechanism itself costs in a round of a large model.

    python -m tests.benchmarks.bench_noise [--parameters 23770304] [--rounds 3] [--clients 4]

Times the real calls on vectors as long as a ResNet-50 backbone with a 128-d embedding
(docs/explanation/method.md#backbones): clip and sum of one virtual client, and
`Mechanism.aggregate`, which is the whole way from the exact integer sum through its digest, keyed
ChaCha20 normals and the integer grid to the float32 mean. The goal is 3 s a round on two
cores. Beside it stands one training step
of the same backbone on a batch of 16 images of 224 x 224, for the share of a round: noise once,
clip and sum once per virtual client, steps many times per virtual client.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.benchmarks.tiny import TINY

PARAMETERS = 10_000 if TINY else 23_770_304
"""Backbone of ResNet-50 with a 128-d embedding."""
GOAL_SECONDS = 3.0
BATCH, PIXELS = (1, 32) if TINY else (16, 224)
STEPS, CLIENTS_PER_ROUND = 8, 32
"""A small round, where the share of the mechanism is as large as it gets."""


class Seconds(NamedTuple):
    """How long one call took."""

    wall: float
    processor: float
    """Processor seconds of all threads, independent of other load on the machine."""


def timed(act: Callable[[], object], times: int) -> list[Seconds]:
    """Seconds of each of several calls."""
    seconds: list[Seconds] = []
    for _ in range(times):
        wall, processor = time.perf_counter(), time.process_time()
        act()
        seconds.append(Seconds(time.perf_counter() - wall, time.process_time() - processor))
    return seconds


def mechanism_seconds(
    parameters: int, rounds: int, clients: int
) -> tuple[list[Seconds], list[Seconds]]:
    """Seconds of each aggregate, and of clip and sum for each virtual client."""
    import tensorflow as tf

    from fedemb.privacy.mechanisms.group_poisson_gaussian import GroupPoissonGaussian
    from fedemb.privacy.queries import build_mechanism

    plan = GroupPoissonGaussian(
        rounds=800,
        l2_norm_clip=1.0,
        noise_multiplier=1.28,
        virtual_clients=156_250,
        groupings=1,
        sampling_probability=0.0131072,
    )
    mechanism = build_mechanism(plan, os.urandom(32), "bench", 0, "inputs")
    params = mechanism.clip
    update = tf.constant(np.random.default_rng(0).normal(size=parameters).astype(np.float32))

    @tf.function
    def contribute(state: tuple[tf.Tensor, ...], update: tf.Tensor) -> tuple[tf.Tensor, ...]:
        record = mechanism.query.preprocess_record(params, [update])
        return mechanism.query.accumulate_preprocessed_record(state, record)

    state = contribute(mechanism.initial_sample_state(parameters), update)

    def one_client() -> None:
        nonlocal state
        state = contribute(state, update)
        np.asarray(state[0][:1])

    per_client = timed(one_client, clients)
    turn = iter(range(rounds))
    return timed(lambda: mechanism.aggregate(next(turn), state), rounds), per_client


def step_seconds(times: int) -> tuple[float, int]:
    """Seconds of one training step of ResNet-50, and how many parameters its backbone has."""
    import keras
    import tensorflow as tf

    body = keras.applications.ResNet50(include_top=False, weights=None, pooling="avg")
    model = keras.Sequential([body, keras.layers.Dense(128)])
    images = tf.random.stateless_uniform([BATCH, PIXELS, PIXELS, 3], seed=[0, 0])
    model(images[:1])

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        return tf.add_n([tf.reduce_sum(gradient) for gradient in gradients])

    step()
    seconds = min(timed(lambda: step().numpy(), times)).processor
    return seconds, sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def main(arguments: list[str]) -> int:
    """Prints the figures; 1 if noise misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--no-step", action="store_true", help="leave the training step out")
    options = parser.parse_args(arguments)
    noise, per_client = mechanism_seconds(options.parameters, options.rounds, options.clients)
    once, each = min(noise), min(per_client)
    say = sys.stdout.write
    say(f"{options.parameters:,} values, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for what, (wall, processor) in (
        ("noise of a round, exact sums to mean", once),
        ("clip and sum of a virtual client", each),
    ):
        say(f"{what}: {wall:.2f} s, {processor:.2f} s of processor (fastest)\n")
    say(f"goal for the noise: {GOAL_SECONDS:g} s\n")
    if not options.no_step:
        step, size = step_seconds(2)
        training = CLIENTS_PER_ROUND * STEPS * step
        private = once.processor + CLIENTS_PER_ROUND * each.processor
        say(f"training step, {size:,} parameters, {BATCH} images: {step:.2f} s of processor\n")
        say(
            f"share of clip, sum and noise in a round of {CLIENTS_PER_ROUND} virtual clients with "
            f"{STEPS} steps: {private / (private + training):.1%} of processor time\n"
        )
    return 0 if once.wall <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
