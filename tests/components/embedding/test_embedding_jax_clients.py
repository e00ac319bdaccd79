"""DP-FedEmb on JAX: the records of TensorFlow, and bits that do not depend on other users."""

from functools import cache

import numpy as np
import pytest

from fedemb.models.backbone_files import save_backbone
from fedemb.models.backbones import build_backbone
from fedemb.training.tensorflow_clients import RoundFunction
from tests.kit.jax.client_cases import LOCAL, MODEL, QUICK, SEED, VARIANTS, clients
from tests.kit.jax.without_tensorflow import said_on_jax
from tests.kit.privacy_worlds import noiseless

pytestmark = pytest.mark.long  # each process compiles for half a minute

ROUND = 3
"""Of `jax_units.total`."""


def _function(backbone, variant, clip):
    mechanism = noiseless(clip)
    local = LOCAL.model_copy(update=VARIANTS[variant])
    rows = 3 if variant == "shared" else 0
    return RoundFunction(backbone, mechanism, local, seed=SEED, shared_head_rows=rows)


@pytest.fixture(scope="module")
def backbone():
    return build_backbone(MODEL, 1)


@pytest.fixture(scope="module")
def records(backbone):
    """A clip and the records of a variant, on TensorFlow; half of them are clipped."""

    @cache
    def of(variant):
        probe = _function(backbone, variant, 1.0)
        first = probe(probe.initial_weights(), clients(), ROUND)
        clip = float(np.median(first.clients[:, 0]))
        function = _function(backbone, variant, clip)
        weights = function.initial_weights()
        made = [function(weights, [client], ROUND).total for client in clients()]
        return {
            f"clip_{variant}": clip,
            f"records_{variant}": np.stack(made),
            f"statistics_{variant}": first.clients,
        }

    return of


@pytest.fixture(scope="module")
def written(backbone, records, tmp_path_factory):
    """Writes a folder with the records of some variants."""

    def written(variants):
        folder = tmp_path_factory.mktemp("clients")
        arrays = {name: part for variant in variants for name, part in records(variant).items()}
        np.savez(folder / "records.npz", **arrays)
        save_backbone(backbone, folder / "backbone.keras")
        return folder

    return written


@pytest.fixture(scope="module")
def found(written):
    """What a process on JAX says of the same clients."""
    return said_on_jax("jax_clients", "sound", written(QUICK))


@pytest.fixture(scope="module")
def other(written):
    """What another says of other devices, precisions and clips."""
    return said_on_jax("jax_clients", "other", written(VARIANTS))


@pytest.fixture(scope="module")
def faulty(written):
    """What another says where a fault is planted."""
    return said_on_jax("jax_clients", "faulty", written(QUICK))


def test_sound_rounds_are_not_refused(found):
    assert "refused" not in found, found["refused"]


@pytest.mark.parametrize("variant", QUICK)
def test_records_are_those_of_tensorflow_to_a_hundred_thousandth_of_the_clip(found, variant):
    assert max(found["apart"][variant]) <= 1e-5, found["apart"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in QUICK])
def test_other_ways_to_train_give_the_records_of_tensorflow(other, variant):
    assert max(other["apart"][variant]) <= 1e-5, other["apart"]


def test_statistics_are_those_of_tensorflow(found, records):
    np.testing.assert_allclose(found["statistics"], records("joint")["statistics_joint"], rtol=1e-4)


def test_a_record_has_the_same_bits_at_any_place_and_beside_any_neighbour(found):
    assert found["problems"] == []
    assert found["compiled"] == 1  # rounds and clients of every size, one compilation


def test_what_fills_shapes_adds_nothing_whatever_it_is(found):
    assert found["anything"]


def test_draws_are_those_of_the_group_and_the_round(found):
    assert found["own draws"] == [True, True]


@pytest.mark.slow
def test_two_and_eight_devices_give_the_bits_of_one(other):
    assert other["devices"] == [True, True]


@pytest.mark.slow
def test_in_bfloat16_records_keep_the_clip_and_stand_for_themselves(other):
    wrong, cosine = other["bfloat16"]
    assert wrong == []
    assert 0.9 < cosine < 1.0


def test_nobody_and_values_that_are_no_numbers_add_nothing(found):
    assert found["empty"]
    assert found["nan"]


@pytest.mark.slow
def test_learning_from_what_fills_a_batch_is_seen(faulty):
    """Clients of whole batches have nothing to fill, and one image is its own mean."""
    whole = np.array([len(client.labels) % LOCAL.batch_size == 0 for client in clients()])
    whole[[0, -1]] = True  # one example; sixteen, after the cap
    apart = np.array(faulty["learns_from_the_fill"])
    assert (apart[~whole] > 1e-3).all(), apart
    assert (apart[whole] <= 1e-5).all(), apart


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "StepsOfTheLongest",
        "CountsTheFill",
        "SeededByPlace",
        "HeadOfTheNeighbour",
        "RowsOfOthers",
        "UpdatesOfAllDevices",
    ],
)
def test_a_planted_bug_is_seen(faulty, fault):
    assert faulty["faults"][fault]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leak", ["StepsOfTheLongest", "HeadOfTheNeighbour", "RowsOfOthers", "UpdatesOfAllDevices"]
)
def test_what_leaks_into_records_is_refused_before_any_client_is_read(faulty, leak):
    assert "position in a batch of 4" in faulty["probe"][leak]
