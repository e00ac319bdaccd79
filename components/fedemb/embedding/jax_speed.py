"""How fast unit gradients are on the devices at hand, beside a plain step of the same net."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from fedemb.config import ModelConfig, UnitGradientConfig
from fedemb.embedding.backbones import build_backbone, trainable_variables, with_bfloat16
from fedemb.embedding.jax_unit_gradient import JaxUnitGradientFunction
from fedemb.embedding.losses import cross_entropy
from fedemb.embedding.preprocessing import preprocess
from fedemb.embedding.rounds import ClientExamples
from fedemb.privacy.mechanisms.mechanism import Cohort
from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.queries import build_mechanism

MICROBATCHES = (16, 64, 256, 512)
VIEWS = (1, 4, 16)
PLAIN_BATCH = 512
_REPEATS = 3
_TOGETHER = 4
"""Micro-batches of a measured round, for each device."""


class Speed(NamedTuple):
    """One measurement; the best of three, after a first one that compiles."""

    precision: str
    views: int
    """K; 0: the plain step."""
    microbatch: int
    """Units side by side on a device; of the plain step its batch."""
    microseconds_per_view: float
    """Of one device."""
    ratio: float
    """To a view of the plain step in the same precision."""
    noise_share: float | None
    """Noise of the round over a round of 4,096 units."""
    compile_seconds: float
    peak_megabytes: float | None
    """The device's peak so far, where it tells."""


def describe_device() -> dict[str, Any]:
    """Device, versions and processors a measurement was taken with."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "keras", "numpy")},
    }


def measure(model: ModelConfig, seconds: float) -> Iterator[Speed]:
    """Measures until the time is over; what is not begun by then is left out.

    Args:
      model: a classifier.
      seconds: in all.
    """
    ends = time.monotonic() + seconds
    net = build_backbone(model, 0)
    for precision, trained in (("float32", net), ("bfloat16", with_bfloat16(net))):
        plain = _plain(trained, precision)
        yield plain
        for views in VIEWS:
            for microbatch in MICROBATCHES:
                if time.monotonic() > ends:
                    return
                yield _unit_gradients(trained, plain, views, microbatch)


def _timed(act: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of an act, the best of some; and of the first one, which compiles."""
    times: list[float] = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times[1:]), times[0]


def _plain(net: Any, precision: str) -> Speed:
    """Forward, backward and step of SGD on one device; nothing is clipped."""
    import jax

    random = np.random.default_rng(0)
    images = random.integers(0, 256, (PLAIN_BATCH, *net.input_shape[1:]), np.uint8)
    labels = random.integers(0, net.output_shape[-1], PLAIN_BATCH).astype(np.int32)
    state = [v.value for v in net.non_trainable_variables]

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        logits, _ = net.stateless_call(weights, state, preprocess(images), training=True)
        return cross_entropy(logits.astype("float32"), labels)

    @jax.jit
    def step(weights: Any, images: Any, labels: Any) -> Any:
        gradients = jax.grad(loss)(weights, images, labels)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    weights = [v.value for v in net.trainable_variables]
    best, first = _timed(lambda: jax.block_until_ready(step(weights, images, labels)))
    return Speed(precision, 0, PLAIN_BATCH, 1e6 * best / PLAIN_BATCH, 1.0, None, first, _peak())


def _unit_gradients(net: Any, plain: Speed, views: int, microbatch: int) -> Speed:
    default = next(iter(MECHANISMS.values()))  # any will do: what is timed is before the noise
    cohort = Cohort(
        population=16, users_per_client=2, clients_per_round=4, noise_multiplier=1.0, rounds=10
    )
    mechanism_plan = default.at(cohort)
    mechanism = build_mechanism(mechanism_plan, bytes(32), "speed", 1, "0" * 64)
    function = JaxUnitGradientFunction(
        net,
        mechanism,
        UnitGradientConfig(microbatch=microbatch, views=views, flip=True, crop_padding=4),
        variables=trainable_variables(net, "all"),
    )
    random, weights = np.random.default_rng(0), function.initial_weights()
    count = _TOGETHER * microbatch * function.worker_count
    units = [
        ClientExamples(
            0,
            unit,
            random.integers(0, 256, (1, *net.input_shape[1:]), np.uint8),
            random.integers(0, net.output_shape[-1], 1),
        )
        for unit in range(count)
    ]
    slabs = list(function.slabs(units, 0))
    function.require_exact(weights)
    best, first = _timed(lambda: function.run(weights, slabs))
    sums = function.run(weights, slabs).sample_state
    rounds = iter(range(mechanism_plan.rounds))
    noise, _ = _timed(lambda: mechanism.aggregate(next(rounds), sums))
    per_view = 1e6 * best / (count * views) * function.worker_count
    return Speed(
        plain.precision,
        views,
        microbatch,
        per_view,
        per_view / plain.microseconds_per_view,
        noise / (noise + best * math.ceil(4096 / count)),
        first,
        _peak(),
    )


def _peak() -> float | None:
    import jax

    found = jax.devices()[0].memory_stats() or {}
    return found["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in found else None
