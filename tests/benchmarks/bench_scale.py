"""Cost of each part at growing numbers of users, images and rounds.

    python -m tests.benchmarks.bench_scale [PART ...]

Each size runs in a process of its own. A line gives processor seconds without imports, the peak of
the resident memory, and the exponent of the growth since the size before: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedemb.privacy.group_mechanisms import GroupPoissonGaussianConfig, TreeAggregationConfig
from fedemb.privacy.planning import plan
from fedemb.privacy.prices import guarantee_of
from tests.benchmarks.tiny import TINY
from tests.kit.process import python

KEY = bytes(range(32))


class Part(NamedTuple):
    """One part of the pipeline."""

    sizes: tuple[int, ...]
    unit: str
    prepare: Callable[[int], Callable[[], object]]
    """Size -> what is timed."""


def _noise(rounds: int) -> float:
    """A noise multiplier with a similar epsilon for any number of rounds."""
    return 0.6 * math.sqrt(max(1, rounds / 1000))


def _sampled(rounds: int, virtual_clients: int = 10_000, probability: float = 0.01):
    section = GroupPoissonGaussianConfig(
        rounds=rounds, sampling_probability=probability, noise_multiplier=_noise(rounds)
    )
    return plan(section, virtual_clients=virtual_clients)


def _tree(rounds: int, virtual_clients: int):
    noise = 3 * _noise(rounds)
    section = TreeAggregationConfig(rounds=rounds, clients_per_round=10, noise_multiplier=noise)
    return plan(section, virtual_clients=virtual_clients)


def coins(units: int) -> Callable[[], object]:
    """Draws the coins of one round; each virtual client has one."""
    from fedemb.privacy.running import build_mechanism

    class Everyone:
        virtual_clients, groupings, user_count = units, 1, units
        user_keys = np.arange(units, dtype=np.uint64)

        def members(self, grouping: int, group: int) -> np.ndarray:
            return np.array([group])

    planned = _sampled(100, units, 16 / units)
    mechanism = build_mechanism(planned, KEY, "run", 0, "0" * 64)
    return lambda: mechanism.sample_clients(0, Everyone())  # pyright: ignore[reportArgumentType]


def accounting(rounds: int) -> Callable[[], object]:
    """Computes epsilon of sampled rounds."""
    planned = _sampled(rounds)
    return lambda: guarantee_of(planned, 1e-8)


def correlated(rounds: int) -> Callable[[], object]:
    """Plans and prices correlated noise."""
    return lambda: guarantee_of(_tree(rounds, 10_000), 1e-8)


def evaluation(images: int) -> Callable[[], object]:
    """Counts all pairs and ranks all images of users with four each."""
    from fedemb.evaluation.metrics import arrange, retrieve
    from fedemb.evaluation.pairs import count_pairs

    random = np.random.default_rng(0)
    users = np.repeat(np.arange(images // 4), 4)
    vectors = random.normal(size=(images // 4, 128))[users] + random.normal(size=(images, 128))
    data = arrange(vectors.astype(np.float32), users)

    def both() -> None:
        count_pairs(data, [1e-3, 1e-2])
        retrieve(data, [1], samples=200)

    return both


PARTS = {
    "coins": Part((100_000, 1_000_000, 10_000_000), "virtual clients", coins),
    "accounting": Part((1000, 10_000, 100_000), "rounds", accounting),
    "correlated": Part((1000, 4000, 16_000), "rounds", correlated),
    "evaluation": Part((4000, 16_000, 64_000), "images", evaluation),
}


def measured(part: str, size: int) -> tuple[float, float]:
    """Returns processor seconds and peak memory in GB of one size, in a process."""
    said = python("-m", "tests.benchmarks.bench_scale", "--one", part, size, timeout=36_000)
    seconds, memory = json.loads(said.splitlines()[-1])
    return seconds, memory


def main() -> None:
    """Prints a line for each size of each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--one", action="store_true", help="Time one PART SIZE in this process.")
    asked = parser.parse_args()
    if asked.one:
        name, size = asked.parts
        act = PARTS[name].prepare(int(size))
        before = time.process_time()
        act()
        seconds = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        sys.stdout.write(f"{json.dumps([seconds, peak])}\n")
        return
    for name in asked.parts:
        part, last = PARTS[name], None
        for size in (400, 1200) if TINY else part.sizes:
            (seconds, memory), growth = measured(name, size), ""
            if last and last[1] > 0:
                exponent = math.log(seconds / last[1]) / math.log(size / last[0])
                growth = f", grows as {part.unit}^{exponent:.2f}"
            sys.stdout.write(
                f"{name:10} {size:>11,} {part.unit}: {seconds:.3g} s, {memory:.2f} GB{growth}\n"
            )
            sys.stdout.flush()
            last = size, seconds


if __name__ == "__main__":
    main()
