"""Local training of a projection on features that its frozen trunk computes once for each user."""

import numpy as np
import pytest

from fedemb.config import AugmentationConfig, LocalTrainingConfig, ModelConfig
from fedemb.data.client_data import choose_examples
from fedemb.errors import ConfigError
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import cut
from fedemb.privacy.sampling import VirtualClient
from fedemb.training import ClientExamples, RoundFunction, build_backbone, trainable_variables
from fedemb.training.feature_cache import (
    FeatureCache,
    FrozenFeatures,
    keeps_features,
    plain_rows,
    unit_key,
)
from tests.kit.privacy_worlds import noiseless

MODEL = ModelConfig(backbone="resnet8", image_size=12, embedding_dim=8, trainable="projection")
LOCAL = LocalTrainingConfig(
    epochs=2, batch_size=5, client_learning_rate=0.02, max_examples_per_client=9
)
USERS = [4, 1, 0, 7, 3]
"""How many images they have."""


class _People:
    """Five users, and who was read."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.images = [random.integers(0, 256, (n, 12, 12, 1), np.uint8) for n in USERS]
        self.labels = [random.integers(0, 3, n) for n in USERS]
        self.read = []

    def load(self, client):
        self.read.append(client.users.tolist())
        users = np.sort(client.users)
        chosen = choose_examples([USERS[user] for user in users], LOCAL.max_examples_per_client)
        images = [self.images[users[n]][turn] for n, turn in chosen]
        labels = [self.labels[users[n]][turn] for n, turn in chosen]
        shaped = np.array(images, np.uint8).reshape(-1, 12, 12, 1)
        return ClientExamples(client.grouping, client.group, shaped, np.array(labels, np.int64))


def _client(*users):
    return VirtualClient(0, 3, np.array(users, np.int64))


def _cache(trunk):
    return FeatureCache(trunk, plain_rows)


def _sum(function, clients):
    total = function(function.initial_weights(), clients, 0).total
    return np.asarray(total, np.float64) / 2.0**function.mechanism.plan.grid_bits


@pytest.mark.long
def test_the_update_is_that_of_images_which_pass_the_trunk_in_every_step():
    people, backbone = _People(), build_backbone(MODEL, 0)
    variables = trainable_variables(backbone, "projection")
    whole = RoundFunction(backbone, noiseless(5.0), LOCAL, variables=variables, seed=4)
    trunk, tip = cut(backbone, "projection")
    short = RoundFunction(tip, noiseless(5.0), LOCAL, seed=4)
    np.testing.assert_array_equal(short.initial_weights(), whole.initial_weights())
    frozen = FrozenFeatures(_cache(trunk), people.load, LOCAL.max_examples_per_client)
    client = _client(3, 0, 4)
    assert len(people.load(client).labels) == 9  # of 14
    wanted, found = _sum(whole, [people.load(client)]), _sum(short, [frozen.load(client)])
    assert np.linalg.norm(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_client_without_one_of_its_users_takes_nothing_new():
    people, (trunk, _) = _People(), cut(build_backbone(MODEL, 0), "projection")
    frozen = FrozenFeatures(_cache(trunk), people.load, 100)
    one, other = frozen.load(_client(4, 0, 2)), frozen.load(_client(3, 1))
    assert people.read == [[0], [2], [4], [1], [3]]
    assert one.images.dtype == np.float32
    assert one.images.shape == (7, trunk.output_shape[-1])
    assert (one.grouping, one.group) == (0, 3)
    less = frozen.load(_client(4, 2))
    np.testing.assert_array_equal(less.images, one.images[4:])
    np.testing.assert_array_equal(less.labels, one.labels[4:])
    moved = frozen.load(_client(4, 1))  # who else is there changes nothing of them, to the bit
    np.testing.assert_array_equal(moved.images[1:], less.images)
    np.testing.assert_array_equal(moved.images[:1], other.images[:1])
    nobody = frozen.load(_client())
    assert nobody.images.shape == (0, trunk.output_shape[-1])
    assert people.read[5:] == [[2]]  # a user without images is requested again


FAR = [3, 3 + 256, 3 + 65_536, 3 + 2**32, 0, 256]
"""Rows whose numbers share their low byte, or their low 16 or 32 bits."""


@pytest.mark.long
def test_users_whose_rows_lie_far_apart_never_share_features():
    """Rows that share their low bits: a key of a byte gives one user the features of another."""
    trunk, _ = cut(build_backbone(MODEL, 0), "projection")

    def images_of(row):
        random = np.random.default_rng(row)
        return random.integers(0, 256, (2, 12, 12, 1), np.uint8), np.array([row % 3, 2])

    def load(client):
        (row,) = client.users
        return ClientExamples(client.grouping, client.group, *images_of(int(row)))

    kept = FrozenFeatures(_cache(trunk), load, 100)
    for row in FAR:
        own = FrozenFeatures(_cache(trunk), load, 100).load(_client(row)).images
        np.testing.assert_array_equal(kept.load(_client(row)).images, own)


def test_key_of_a_unit_names_its_whole_row_and_its_place():
    """As training of a head keeps features: by the row of a unit, and the place of an image."""
    clients = [VirtualClient(place, 7, np.array([row])) for row in FAR for place in (0, 1, 256)]
    keys = {unit_key(client) for client in clients}
    assert len(keys) == len(clients)
    assert len({len(key) for key in keys}) == 1
    of_another_group = VirtualClient(0, 8, np.array([FAR[0]]))
    assert unit_key(of_another_group) == unit_key(clients[0])


def test_a_net_that_was_cut_is_saved_as_it_was(tmp_path):
    backbone = build_backbone(MODEL, 0)
    before = save_backbone(backbone, tmp_path / "before.keras")
    trunk, tip = cut(backbone, "projection")
    assert save_backbone(backbone, tmp_path / "after.keras") == before
    images = np.random.default_rng(1).uniform(-1, 1, (4, 12, 12, 1)).astype(np.float32)
    again = load_backbone(tmp_path / "after.keras", MODEL)
    np.testing.assert_allclose(tip(trunk(images)), again(images), atol=1e-6)


def test_a_projection_inside_of_another_layer_is_refused():
    import keras

    inputs = keras.Input((12, 12, 1))
    inside = keras.Model(inputs, build_backbone(MODEL, 0)(inputs))
    with pytest.raises(ConfigError, match="needs a layer embedding at the end"):
        cut(inside, "projection")


def test_pixels_that_change_are_no_constant_features():
    assert keeps_features(MODEL, LOCAL)
    moving = LOCAL.model_copy(update={"augmentation": AugmentationConfig()})
    assert not keeps_features(MODEL, moving)
    assert not keeps_features(MODEL.model_copy(update={"trainable": "all"}), LOCAL)
