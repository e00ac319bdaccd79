"""Measures the speed of private rounds on the available devices, and of a plain training step."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Literal, NamedTuple

import numpy as np

from fedemb.config import LocalTrainingConfig, ModelConfig, UnitGradientConfig
from fedemb.engine.jax.client_rounds import JaxRoundFunction
from fedemb.engine.jax.rounds import DeviceUnits, JaxRounds
from fedemb.engine.jax.unit_gradient import JaxUnitGradientFunction
from fedemb.engine.rounds import ClientExamples
from fedemb.engine.vectorized_rounds import Units
from fedemb.errors import ConfigError
from fedemb.models.arrays import JaxArray, Model
from fedemb.models.backbones import build_backbone, trainable_variables, with_bfloat16
from fedemb.models.keras_backend import jax_devices
from fedemb.models.losses import cross_entropy
from fedemb.models.preprocessing import preprocess
from fedemb.privacy.mechanisms.mechanism import Cohort
from fedemb.privacy.mechanisms.registry import MECHANISMS
from fedemb.privacy.queries import Mechanism, build_mechanism

MICROBATCHES = (16, 64, 256, 512)
VIEWS = (1, 4, 16)
PLAIN_BATCH = 512
_REPEATS = 3
_NAMES = {False: "float32", True: "bfloat16"}
_TOGETHER = 4
"""Micro-batches of a measured round, for each device."""


class ClientWorkload(NamedTuple):
    """A round of virtual clients of equal size."""

    backbone: str
    size: int
    channels: Literal[1, 3]
    clients: int
    examples: int
    batch_size: int
    epochs: int
    rows: int = 64
    """Rows of the local head of each client."""


WORKLOADS = {
    "W1": ClientWorkload("lenet", 28, 1, clients=16, examples=128, batch_size=32, epochs=4),
    "W2": ClientWorkload("resnet8", 32, 3, clients=8, examples=64, batch_size=16, epochs=1),
}
"""Workloads of docs/explanation/performance.md."""


class Speed(NamedTuple):
    """One measurement; the best of three, after a first one that compiles."""

    work: str
    """`plain` (forward, backward and step), `units` (DP-SGD), or a key of `WORKLOADS`."""
    net: str
    precision: str
    views: int
    """K: number of augmented copies of an image, or of visits by a client."""
    microbatch: int
    """Units side by side on a device; for the plain step, its batch size."""
    microseconds_per_view: float
    """Microseconds per view on one device; 0 if the step did not fit into memory."""
    ratio: float
    """Time of a view relative to the plain step of the same network and precision."""
    noise_share: float | None
    """Share of the noise in the time of a round of 4,096 units, or of this round of clients."""
    compile_seconds: float
    step_megabytes: float | None
    """Memory of one step on a device, as planned by the compiler."""
    peak_megabytes: float | None
    """Peak memory of the device so far, if it reports one."""


def describe_device() -> dict[str, object]:
    """Device, versions and processors a measurement was taken with.

    Raises:
      ConfigError: JAX does not see the accelerator that there is to be.
    """
    devices = jax_devices()
    return {
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "keras", "numpy")},
    }


def measure(model: ModelConfig, seconds: float) -> Iterator[Speed]:
    """Measures until the time is over; measurements not started by then are skipped.

    Args:
      model: a classifier, for unit gradients.
      seconds: in all.
    """
    ends = time.monotonic() + seconds
    for speed in _measurements(model):
        yield speed
        if time.monotonic() > ends:
            return


def _measurements(model: ModelConfig) -> Iterator[Speed]:
    for half in (False, True):
        for name, workload in WORKLOADS.items():
            yield from _clients(name, workload, half)
        net = build_backbone(model, 0)
        net = with_bfloat16(net) if half else net
        plain = _plain(net, model.backbone, half)
        yield plain
        for views in VIEWS:
            for microbatch in MICROBATCHES:
                speed = _unit_gradients(net, plain, views, microbatch)
                yield speed
                if not speed.microseconds_per_view:
                    break  # a larger one does not fit either


def fastest(speeds: Iterable[Speed]) -> Speed | None:
    """The unit gradients that take least for a view: their micro-batch is one to set."""
    found = [one for one in speeds if one.work == "units" and one.microseconds_per_view]
    return min(found, key=lambda one: one.microseconds_per_view, default=None)


def _timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds of an act, the best of some; and of the first one, which compiles."""
    times: list[float] = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times[1:]), times[0]


def _plain(net: Model, name: str, half: bool, rows: int = 0) -> Speed:
    """Forward, backward and step of SGD on one device; nothing is clipped.

    The model is a backbone with a head of `rows` rows, or an unchanged classifier.
    """
    import jax
    import jax.numpy as jnp

    random, classes = np.random.default_rng(0), rows or net.output_shape[-1]
    images = random.integers(0, 256, (PLAIN_BATCH, *net.input_shape[1:]), np.uint8)
    labels = random.integers(0, classes, PLAIN_BATCH).astype(np.int32)
    state = [v.value for v in net.non_trainable_variables]

    def loss(weights: list[JaxArray], images: JaxArray, labels: JaxArray) -> JaxArray:
        *trained, head = weights
        outputs = net.stateless_call(trained, state, preprocess(images), training=True)[0]
        logits = outputs.astype("float32")
        return cross_entropy(logits @ head if rows else logits, labels)

    @jax.jit
    def step(weights: list[JaxArray], images: JaxArray, labels: JaxArray) -> list[JaxArray]:
        gradients = jax.grad(loss)(weights, images, labels)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    head = jnp.zeros((net.output_shape[-1], rows), jnp.float32)
    weights = [*(v.value for v in net.trainable_variables), head]
    best, first = _timed(lambda: jax.block_until_ready(step(weights, images, labels)))
    per_view = 1e6 * best / PLAIN_BATCH
    return Speed(
        "plain", name, _NAMES[half], 1, PLAIN_BATCH, per_view, 1.0, None, first, None, _peak()
    )


def _mechanism(rounds: int = 10) -> Mechanism:
    default = next(iter(MECHANISMS.values()))  # any will do: what is timed is before the noise
    cohort = Cohort(
        population=16, users_per_client=2, clients_per_round=4, noise_multiplier=1.0, rounds=rounds
    )
    return build_mechanism(default.at(cohort), bytes(32), "speed", 1, "0" * 64)


def _clients(name: str, workload: ClientWorkload, half: bool) -> Iterator[Speed]:
    """The plain step of a workload's net, and its round of virtual clients."""
    model = ModelConfig(
        backbone=workload.backbone, image_size=workload.size, channels=workload.channels
    )
    net = build_backbone(model, 0)
    net = with_bfloat16(net) if half else net
    plain = _plain(net, workload.backbone, half, workload.rows)
    yield plain
    local = LocalTrainingConfig(
        epochs=workload.epochs,
        batch_size=workload.batch_size,
        max_examples_per_client=workload.examples,
    )
    function = JaxRoundFunction(
        net, _mechanism(), local, parallel_clients=-(-workload.clients // len(jax_devices()))
    )
    random = np.random.default_rng(0)
    shape = (workload.examples, *net.input_shape[1:])
    labels = np.arange(workload.examples) % workload.rows
    clients = [
        ClientExamples(0, client, random.integers(0, 256, shape, np.uint8), labels)
        for client in range(workload.clients)
    ]
    looks = workload.clients * workload.examples * workload.epochs
    yield _round(name, function, clients, plain, looks=looks, views=workload.epochs, of=1)


def _unit_gradients(net: Model, plain: Speed, views: int, microbatch: int) -> Speed:
    function = JaxUnitGradientFunction(
        net,
        _mechanism(),
        UnitGradientConfig(microbatch=microbatch, views=views, flip=True, crop_padding=4),
        variables=trainable_variables(net, "all"),
    )
    random = np.random.default_rng(0)
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
    return _round(
        "units",
        function,
        units,
        plain,
        looks=count * views,
        views=views,
        of=math.ceil(4096 / count),
    )


def _round(
    work: str,
    function: JaxRounds[Units, DeviceUnits],
    units: Sequence[ClientExamples],
    plain: Speed,
    *,
    looks: int,
    views: int,
    of: int,
) -> Speed:
    """Times a round, that is, a share of one that is `of` times as large.

    Args:
      work: see `Speed`.
      function: the round.
      units: it is over.
      plain: the plain step of the same net.
      looks: at images, in this round.
      views: see `Speed`.
      of: such rounds in one whose noise is audited.
    """
    mechanism, weights = function.mechanism, function.initial_weights()
    parameters = mechanism.sample_params()
    named = work, plain.net, plain.precision, views, function.together
    try:
        planned = function.step_bytes() / 2**20
        slabs = list(function.slabs(units, 0))
        best, first = _timed(lambda: function.run(weights, slabs, parameters))
        sums = function.run(weights, slabs, parameters).sample_state
    except ConfigError:  # too little memory, by plan or in fact
        return Speed(*named, 0.0, 0.0, None, 0.0, None, _peak())
    rounds = iter(range(mechanism.plan.rounds))
    noise, _ = _timed(lambda: mechanism.aggregate(next(rounds), sums))
    per_view = 1e6 * best / looks * function.worker_count
    share = noise / (noise + best * of)
    ratio = per_view / plain.microseconds_per_view
    return Speed(*named, per_view, ratio, share, first, planned, _peak())


def _peak() -> float | None:
    import jax

    found = jax.devices()[0].memory_stats() or {}
    return found["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in found else None
