"""Rounds of virtual clients on JAX, on eight devices of one processor and without TensorFlow.

`python -m tests.kit.jax.jax_clients WHAT FOLDER` reads a backbone and records that the
test wrote, and prints as JSON what it found: of `sound` rounds, of `other` devices and
precisions, or of `faulty` rounds, in which something leaks from client to client.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

from fedemb.training.jax_clients import JaxRoundFunction
from tests.kit.jax.cases import LOCAL, MODEL, QUICK, SEED, VARIANTS, clients
from tests.kit.jax.jax_units import bfloat16, own_draws, print_found, problems, refusal, total
from tests.kit.jax.without_tensorflow import forbid
from tests.kit.privacy_worlds import noiseless

JaxRoundFunction.probe_units = 8


class HeadOfTheNeighbour(JaxRoundFunction):
    """Each client starts with the head of its neighbour."""

    def _records(self, broadcast, units):
        import jax.numpy as jnp

        return super()._records(broadcast, units._replace(head=jnp.roll(units.head, 1, 0)))


class FilledWithAnything(JaxRoundFunction):
    """No fault: rows without a client may have any content."""

    def _share(self, units, *rest):
        share = super()._share(units, *rest)
        for place in range(len(share.rows)):
            count, epochs = share.examples[place], self.objective.config.epochs
            share.images[place, count:] = 77
            share.rows[place, count:] = 1
            share.order[place, epochs * count :] = max(count, 1) - 1
            share.draws[place, epochs * count :] = 0.5
            share.head[place, share.classes[place] :] = 3.0
        return share


class UpdatesOfAllDevices(JaxRoundFunction):
    """Each record is the sum of those at the same place of every device."""

    def _records(self, *given):
        import jax

        from fedemb.training.jax_rounds import _UNITS, on_each_device

        updates, rows = super()._records(*given)
        return on_each_device(jax.lax.psum(updates, _UNITS)), rows


def round_function(net, kind=JaxRoundFunction, devices=1, clip=1e-3, variant="joint"):
    import jax

    return kind(
        net,
        noiseless(clip),
        LOCAL.model_copy(update=VARIANTS[variant]),
        seed=SEED,
        parallel_clients=4,
        devices=jax.devices()[:devices],
        shared_head_rows=3 if variant == "shared" else 0,
    )


def backbone_of(folder):
    from fedemb.models.backbone_files import load_backbone

    return load_backbone(folder / "backbone.keras", MODEL)


def apart(folder, backbone, kind, variant):
    """Of each client: how far its record is from TensorFlow's, in clips."""
    wanted = np.load(folder / "records.npz")
    clip = float(wanted[f"clip_{variant}"])
    one = round_function(backbone, kind, clip=clip, variant=variant)
    grid = 2.0**one.mechanism.plan.grid_bits
    records = zip(clients(), wanted[f"records_{variant}"], strict=True)
    return [float(np.linalg.norm((total(one, [c]) - record) / grid)) for c, record in records]


def faulty(folder):
    """What is said before the first client of a layout that leaks."""
    backbone, leaks = backbone_of(folder), ((HeadOfTheNeighbour, 1), (UpdatesOfAllDevices, 2))
    return [refusal(round_function(backbone, fault, count), clients()) for fault, count in leaks]


def other(folder):
    """Rounds on several devices, in bfloat16, and with other ways to train."""
    from fedemb.models.backbones import with_bfloat16

    backbone, units = backbone_of(folder), clients()
    one = round_function(backbone)
    whole = total(one, units)
    return {
        "devices": [
            np.array_equal(total(round_function(backbone, devices=count), units), whole)
            for count in (2, 8)
        ],
        "bfloat16": bfloat16(one, round_function(with_bfloat16(backbone)), units),
        "apart": {
            v: apart(folder, backbone, JaxRoundFunction, v) for v in VARIANTS if v not in QUICK
        },
    }


def sound(folder):
    backbone, units, found = backbone_of(folder), clients(), {}
    function = partial(round_function, backbone)
    found["apart"] = {v: apart(folder, backbone, JaxRoundFunction, v) for v in QUICK}
    one = function()
    found["problems"] = problems(one, units)
    found["own draws"] = own_draws(one, units[3])
    found["compiled"] = one._add._cache_size()
    whole = total(one, units)
    found["anything"] = np.array_equal(total(function(FilledWithAnything), units), whole)
    found["empty"] = not total(one, []).any()
    sums = one(one.initial_weights(), units, 3).clients
    found["statistics"] = sums.tolist()
    nothing = one.initial_weights() * np.float32(np.nan)
    found["nan"] = not np.asarray(one(nothing, units, 3).total).any()
    return found


if __name__ == "__main__":
    forbid(devices=8)
    print_found({"sound": sound, "other": other, "faulty": faulty}[sys.argv[1]], Path(sys.argv[2]))
