"""Rounds of virtual clients on JAX, on eight devices of one processor and without TensorFlow.

`python -m tests.components.embedding.jax_clients FOLDER` reads a backbone and records that the test
wrote, and prints one JSON object of what it found. Faults are planted here, each in a round of its
own; `problems` must see them.
"""

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

from fedemb.embedding import jax_local_training, jax_rounds
from fedemb.embedding.jax_client_rounds import JaxRoundFunction
from fedemb.embedding.rounds import ClientExamples
from fedemb.errors import ConfigError, Refused
from tests.components.embedding.client_cases import LOCAL, MODEL, SEED, VARIANTS, clients
from tests.components.embedding.jax_units import (
    bfloat16,
    mechanism,
    own_draws,
    problems,
    told,
    total,
)
from tests.components.embedding.without_tensorflow import forbid

JaxRoundFunction.probed = 8


class StepsOfTheLongest(JaxRoundFunction):
    """Whoever has ended goes on with the examples that fill the last batch."""

    def _share(self, units, *rest):
        share = super()._share(units, *rest)
        share.examples[: len(units)] = share.examples.max()
        return share


class LearnsFromTheFill(JaxRoundFunction):
    """What fills a short batch is learned from: of the same client, so that no other is moved."""

    def _records(self, *given):
        sound = jax_local_training.Real
        jax_local_training.Real = lambda examples, classes: sound(examples | True, classes)
        try:
            return super()._records(*given)
        finally:
            jax_local_training.Real = sound


class CountsTheFill(JaxRoundFunction):
    """What fills the places is a client of its own, and is added."""

    def _share(self, units, *rest):
        share = super()._share(units, *rest)
        for place in range(len(units), len(share.rows)):
            for part in share[:-1]:
                part[place] = part[0]
        return share._replace(count=np.int32(len(share.rows)))


class SeededByPlace(JaxRoundFunction):
    """Order and head are drawn by the place in the step."""

    def _share(self, units, *rest):
        placed = [
            ClientExamples(unit.grouping, place, unit.images, unit.labels)
            for place, unit in enumerate(units)
        ]
        return super()._share(placed, *rest)


class HeadOfTheNeighbour(JaxRoundFunction):
    """Each client begins with the head of the one beside it."""

    def _records(self, broadcast, units, clip):
        import jax.numpy as jnp

        return super()._records(broadcast, units._replace(head=jnp.roll(units.head, 1, 0)), clip)


class RowsOfOthers(JaxRoundFunction):
    """A client learns from images that lie beside its own."""

    def _records(self, broadcast, units, clip):
        import jax.numpy as jnp

        images = units.images.at[:, 0].set(jnp.roll(units.images[:, 0], 1, 0))
        return super()._records(broadcast, units._replace(images=images), clip)


class FilledWithAnything(JaxRoundFunction):
    """No fault: whatever lies where nobody is."""

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

        from fedemb.embedding.jax_rounds import _UNITS, on_each_device

        updates, rows = super()._records(*given)
        return on_each_device(jax.lax.psum(updates, _UNITS)), rows


FAULTS = (StepsOfTheLongest, CountsTheFill, SeededByPlace, HeadOfTheNeighbour, RowsOfOthers)


def main(folder):
    import jax

    from fedemb.embedding.backbones import with_bfloat16
    from fedemb.embedding.loading import load_backbone

    backbone, units = load_backbone(folder / "backbone.keras", MODEL), clients()
    wanted, found = np.load(folder / "records.npz"), {}

    def function(
        kind=JaxRoundFunction, devices=1, clip=1e-3, variant="joint", net=backbone, **changes
    ):
        return kind(
            net,
            mechanism(clip),
            LOCAL.model_copy(update=VARIANTS[variant] | changes),
            seed=SEED,
            parallel_clients=4,
            devices=jax.devices()[:devices],
            shared_head_rows=3 if variant == "shared" else 0,
        )

    def apart(kind, variant):
        """Of each client: how far its record is from TensorFlow's, in clips."""
        one = function(kind, clip=float(wanted[f"clip_{variant}"]), variant=variant)
        grid = 2.0**one.mechanism.plan.grid_bits
        records = enumerate(wanted[f"records_{variant}"])
        return [
            float(np.linalg.norm((total(one, [units[unit]]) - record) / grid))
            for unit, record in records
        ]

    found["apart"] = {variant: apart(JaxRoundFunction, variant) for variant in VARIANTS}
    found["learns_from_the_fill"] = apart(LearnsFromTheFill, "joint")
    one = function()
    found["problems"] = problems(one, units)
    found["own draws"] = own_draws(one, units[3])
    found["compiled"] = one._add._cache_size()
    whole = total(one, units)
    found["anything"] = np.array_equal(total(function(FilledWithAnything), units), whole)
    found["devices"] = [np.array_equal(total(function(devices=n), units), whole) for n in (2, 8)]
    found["bfloat16"] = bfloat16(one, function(net=with_bfloat16(backbone)), units)
    found["nobody"] = not total(one, []).any()
    sums = one(one.initial_weights(), units, 3).clients
    found["statistics"] = sums.tolist()
    nothing = one.initial_weights() * np.float32(np.nan)
    found["nan"] = not np.asarray(one(nothing, units, 3).sample_state[0]).any()

    found["faults"], found["probe"] = {}, {}
    for fault, devices in (*((fault, 1) for fault in FAULTS), (UpdatesOfAllDevices, 2)):
        faulty = function(fault, devices)
        faulty._shown = True
        found["faults"][fault.__name__] = problems(faulty, units)
    for fault, devices in (
        (StepsOfTheLongest, 1),
        (HeadOfTheNeighbour, 1),
        (RowsOfOthers, 1),
        (UpdatesOfAllDevices, 2),
    ):
        try:
            found["probe"][fault.__name__] = total(function(fault, devices), units).tolist()
        except Refused as error:
            found["probe"][fault.__name__] = str(error)

    jax_rounds.memory_of = lambda _device: 1 << 19
    try:
        found["room"] = total(function(), units).tolist()
    except ConfigError as error:
        found["room"] = str(error)
    return found


if __name__ == "__main__":
    forbid(devices=8)
    sys.stdout.write(json.dumps(told(main, Path(sys.argv[1]))) + "\n")
