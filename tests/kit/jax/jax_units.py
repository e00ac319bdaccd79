"""Rounds of DP-SGD on JAX, on eight devices made of one processor and without TensorFlow.

`python -m tests.kit.jax.jax_units WHAT FOLDER` reads a classifier and records that the
test wrote, and prints one JSON object of what it found: of `sound` rounds, of `other` devices,
precisions and clips, or of `faulty` rounds, in which something leaks from unit to unit.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

from fedemb.config import UnitGradientConfig
from fedemb.errors import ConfigError, Refused
from fedemb.models import keras_backend as backend
from fedemb.training import jax_rounds
from fedemb.training.jax_rounds import JaxUnitGradientFunction
from tests.kit.jax.cases import CONFIG, ROUND, SEED, UNIT_MODEL, units
from tests.kit.jax.without_tensorflow import forbid
from tests.kit.privacy_worlds import noiseless

JaxUnitGradientFunction.probe_units = 16


def total(function, units):
    sums = function(function.initial_weights(), units, ROUND)
    return np.asarray(sums.total)


def print_found(look, folder):
    """What is found, or why the product refuses to compute."""
    try:
        found = look(folder)
    except (ConfigError, Refused) as error:
        found = {"refused": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")


def refusal(function, units):
    """Why it does not compute a round, or the sum where it does."""
    try:
        return total(function, units).tolist()
    except (ConfigError, Refused) as error:
        return str(error)


def own_draws(function, unit):
    """Whether the same images are drawn otherwise for another group, and in another round."""
    weights, other = function.initial_weights(), replace(unit, group=unit.group + 100)

    def record(unit, round_index):
        return np.asarray(function(weights, [unit], round_index).total)

    one = record(unit, ROUND)
    return [
        not np.array_equal(one, record(other, ROUND)),
        not np.array_equal(one, record(unit, ROUND + 1)),
    ]


def problems(function, units):
    """What is wrong with a round; nothing is good news."""
    found = []
    grid = 2.0**function.mechanism.plan.grid_bits
    whole = total(function, units)
    alone = [total(function, [unit]) for unit in units]
    if max(np.linalg.norm(record / grid) for record in alone) > 1.0:
        found.append("a unit moves the sum by more than the clip")
    for left_out in (0, len(units) // 2, len(units) - 1):
        rest = [unit for unit in units if unit.group != left_out]
        if not np.array_equal(whole - total(function, rest), alone[left_out]):
            found.append("a unit's record depends on others")
    if not np.array_equal(total(function, units[::-1]), whole):
        found.append("the order of units moves the sum")
    return found


class MeanOfTheBatch(JaxUnitGradientFunction):
    """Every view has a little of its neighbours, as batch normalisation mixes them."""

    def _views(self, units):
        views = super()._views(units)
        return views - 0.01 * views.mean(axis=0, keepdims=True)


class OneDeviceOfOtherBits(JaxUnitGradientFunction):
    """The second device rounds otherwise than the first."""

    def _record(self, broadcast, images, labels, weights):
        import jax

        update, loss = super()._record(broadcast, images, labels, weights)
        return update * (1 + 1e-6 * jax.lax.axis_index(jax_rounds._UNITS)), loss


def bfloat16(exact, rough, units):
    """What is wrong with rounds in bfloat16, and the cosine between their sum and the exact one."""
    one, two = (total(function, units).astype(float) for function in (exact, rough))
    return problems(rough, units), one @ two / np.linalg.norm(one) / np.linalg.norm(two)


def beside_jax_privacy(classifier, variables, units):
    """How far each clipped gradient is from that of jax-privacy, in clips; half are clipped."""
    import jax
    import jax.numpy as jnp
    from jax_privacy import clipped_grad

    from fedemb.models.keras_backend import preprocess

    def loss(weights, image, label):
        logits, _ = classifier.stateless_call(weights, [], preprocess(image))
        return -jax.nn.log_softmax(logits)[0, label[0]]

    def gradient(clip, unit):
        found = clipped_grad(loss, l2_clip_norm=clip, batch_argnums=(1, 2), return_grad_norms=True)
        sums, aux = found([v.value for v in variables], unit.images, jnp.asarray(unit.labels))
        return np.concatenate([np.ravel(part) for part in sums]) / clip, aux.grad_norms[0]

    units = [replace(unit, images=unit.images[:1], labels=unit.labels[:1]) for unit in units]
    clip = float(np.median([gradient(1.0, unit)[1] for unit in units]))
    one = UnitGradientConfig(microbatch=4)
    function = JaxUnitGradientFunction(classifier, noiseless(clip), one, variables=variables)
    function._layout_checked = True
    grid = 2.0**function.mechanism.plan.grid_bits
    return [
        float(np.linalg.norm(total(function, [unit]) / grid + gradient(clip, unit)[0]))
        for unit in units
    ]


def _refused():
    try:
        return len(backend.jax_devices())
    except ConfigError as error:
        return str(error)


def _refusals(folder):
    """What is said of accelerators that are not there, of an old driver, of two kinds of JAX."""
    os.environ[backend.ACCELERATOR] = "nvidia.com/gpu"
    found = {"promised": _refused()}
    del os.environ[backend.ACCELERATOR]
    found["alone"] = _refused()
    files, backend.ACCELERATOR_FILES = backend.ACCELERATOR_FILES, (str(folder),)
    backend.DRIVER_FILE = folder / "driver"
    backend.DRIVER_FILE.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02\n")
    found["old"] = _refused()
    backend.ACCELERATOR_FILES = files
    for name in ("jax-cuda12-plugin", "libtpu"):
        place = folder / f"{name.replace('-', '_')}-1.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    sys.path.append(str(folder))
    found["two"] = _refused()
    sys.path.remove(str(folder))
    return found


def small_net():
    """For all but the comparison: each round of its own is compiled."""
    from fedemb.models.backbones import build_backbone

    return build_backbone(UNIT_MODEL.model_copy(update={"backbone": "tanh_cnn"}), 1)


def round_function(net, kind=JaxUnitGradientFunction, devices=1, clip=1e-3, **changes):
    """By default every unit is clipped."""
    import jax

    from fedemb.models.backbones import trainable_variables

    return kind(
        net,
        noiseless(clip),
        CONFIG.model_copy(update=changes),
        variables=trainable_variables(net, "all"),
        seed=SEED,
        devices=jax.devices()[:devices],
    )


def faulty(_folder):
    """What is said before the first unit of a layout that leaks."""
    small, leaks = small_net(), ((MeanOfTheBatch, 1), (OneDeviceOfOtherBits, 2))
    return [refusal(round_function(small, fault, count), units()) for fault, count in leaks]


def other(folder):
    """Rounds on several devices, in bfloat16, and beside jax-privacy."""
    import jax

    from fedemb.models.backbones import trainable_variables, with_bfloat16

    small, people = small_net(), units()
    one = round_function(small)
    whole = total(one, people)
    return {
        "device_count": len(jax.devices()),
        "devices": [
            np.array_equal(total(round_function(small, devices=count), people), whole)
            for count in (2, 8)
        ],
        "bfloat16": bfloat16(one, round_function(with_bfloat16(small)), people),
        "oracle": beside_jax_privacy(small, trainable_variables(small, "all"), people),
    }


def sound(folder):
    import jax
    import jax.numpy as jnp

    from fedemb.models.backbone_files import load_backbone
    from fedemb.models.layers import _rooted

    found = {"slope": jax.vmap(jax.grad(_rooted))(jnp.array([0.0, 4.0])).tolist()}
    classifier = load_backbone(folder / "backbone.keras", UNIT_MODEL)
    small, people = small_net(), units()
    wanted = np.load(folder / "records.npz")
    function = partial(round_function, small)

    one = round_function(classifier, clip=float(wanted["clip"]))
    grid = 2.0**one.mechanism.plan.grid_bits
    found["problems"] = problems(one, people)
    found["own draws"] = own_draws(one, people[1])
    found["compiled"] = one._add._cache_size()
    records = [total(one, [unit]) for unit in people]
    found["apart"] = [
        float(np.linalg.norm((record - other) / grid))
        for record, other in zip(records, wanted["records"], strict=True)
    ]
    found["empty"] = not total(one, []).any()

    broken = function()
    broken._layout_checked = True
    nothing = broken.initial_weights() * np.float32(np.nan)
    found["nan"] = not np.asarray(broken(nothing, people, ROUND).total).any()

    slow = function()
    slow._add = lambda *_: (jnp.zeros(1 << 45),) * 2
    slow._layout_checked = True
    found["memory"] = refusal(slow, people)

    found["refusals"] = _refusals(folder)

    exact, jax_rounds.exact_numbers = jax_rounds.exact_numbers, nullcontext
    found["narrow"] = refusal(function(), people)
    jax_rounds.exact_numbers = exact
    return found


if __name__ == "__main__":
    forbid(devices=8)
    print_found({"sound": sound, "other": other, "faulty": faulty}[sys.argv[1]], Path(sys.argv[2]))
