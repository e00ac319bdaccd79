"""The round function against a straightforward reference, and what one user can change."""

import dataclasses
import doctest

import numpy as np
import pytest
import tensorflow as tf

from fedemb import training as embedding
from fedemb.config import (
    AugmentationConfig,
    LocalTrainingConfig,
    LossConfig,
    ModelConfig,
)
from fedemb.models.backbones import with_bfloat16
from fedemb.models.losses import build_loss
from fedemb.privacy.running import build_mechanism
from fedemb.training import (
    ClientExamples,
    RoundFunction,
    build_backbone,
    preprocess,
    trainable_variables,
)
from fedemb.training import tensorflow_clients as rounds_module
from fedemb.training.clients import Objective
from fedemb.training.tensorflow_clients import first_head
from tests.kit.privacy_worlds import make_plan, noiseless

SIZE, DIM = 12, 8
MODEL = ModelConfig(backbone="tiny", image_size=SIZE, embedding_dim=DIM)
LOCAL = LocalTrainingConfig(
    epochs=2, batch_size=5, client_learning_rate=0.005, head_learning_rate_scale=4
)


def _clients(count=5, seed=0):
    random = np.random.default_rng(seed)
    clients = []
    for group in range(count):
        examples = 3 + 4 * group
        images = random.integers(0, 256, (examples, SIZE, SIZE, 1), np.uint8)
        labels = random.integers(-(2**60), 2**60, 4)[random.integers(0, 4, examples)]
        clients.append(ClientExamples(0, group, images, labels))
    return clients


def _sum(function, clients, round_index=3):
    sums = function(function.initial_weights(), clients, round_index)
    return np.asarray(sums.total), sums


def _function(local=LOCAL, mechanism=None, **changes):
    backbone = build_backbone(MODEL, seed=1)
    return RoundFunction(backbone, mechanism or noiseless(), local, seed=9, **changes)


def _reference_update(function, client, local, round_index):
    """Plain Keras, eager, one list per variable."""
    objective, backbone = function.objective, function.objective.backbone
    data = function._data(client, round_index)
    variables = list(objective.variables)
    before = [v.numpy() for v in variables]
    images, rows = tf.constant(client.images), tf.constant(data.rows)
    head = tf.Variable(first_head(objective, [v.value for v in variables], data))
    loss = build_loss(local.loss)
    slots = [tf.zeros_like(v) for v in [*variables, head]]
    count = len(client.labels)
    order = data.order.reshape(local.epochs, count)
    for epoch in range(local.epochs):
        if local.refresh_prototypes:
            unit = tf.math.l2_normalize(backbone(preprocess(images), training=True), axis=1)
            sums = [unit.numpy()[data.rows == row].sum(0) for row in range(head.shape[0])]
            head.assign(tf.math.l2_normalize(tf.constant(sums), axis=1))
        for start in range(0, count, local.batch_size):
            chosen = order[epoch, start : start + local.batch_size]
            with tf.GradientTape() as tape:
                embeddings = backbone(preprocess(tf.gather(images, chosen)), training=True)
                value = loss(embeddings, head, tf.gather(rows, chosen))
            gradients = tape.gradient(value, [*[v.value for v in variables], head])
            for place, gradient in enumerate(gradients):
                is_head = place == len(variables)
                slots[place] = local.client_momentum * slots[place] + gradient
                rate = local.client_learning_rate
                if is_head:
                    head.assign_sub(rate * local.head_learning_rate_scale * slots[place])
                else:
                    variables[place].assign(variables[place] - rate * slots[place])
    update = np.concatenate(
        [(v.numpy() - old).ravel() for v, old in zip(variables, before, strict=True)]
    )
    for variable, old in zip(variables, before, strict=True):
        variable.assign(old)
    return update.astype(np.float64)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"client_momentum": 0.0, "loss": LossConfig(kind="softmax")},
        {
            "head_init": "prototypes",
            "refresh_prototypes": True,
            "head_learning_rate_scale": 0.0,
            "client_momentum": 0.0,
        },
    ],
    ids=["joint", "plain", "refreshed"],
)
def test_clipped_sum_equals_a_straightforward_reference(changes):
    local, clients = LOCAL.model_copy(update=changes), _clients()
    plain = _function(local)
    updates = [_reference_update(plain, client, local, 3) for client in clients]
    norms = [np.linalg.norm(update) for update in updates]
    clip = float(np.median(norms))
    assert min(norms) < clip < max(norms)  # some are clipped, some are not
    expected = sum(u * min(1.0, clip / max(n, 1e-9)) for u, n in zip(updates, norms, strict=True))
    mechanism = noiseless(clip)
    total, sums = _sum(_function(local, mechanism, workers=2), clients)
    found = total * clip / 2.0**mechanism.plan.grid_bits
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    np.testing.assert_allclose(sorted(sums.clients[:, 0]), sorted(norms), rtol=1e-3)


@pytest.mark.planted_bug(9)
def test_one_user_sends_no_other_client_to_another_worker():
    """Workers may differ in their floats, so sizes and empty clients decide nothing."""

    def workers(clients):
        slabs = function.slabs(clients, 0)
        return {
            share.data.images[start].tobytes(): number
            for slab in slabs
            for number, share in enumerate(slab)
            for start in share.offsets[:-1]
        }

    function, few, many = _function(workers=2), _clients(8), _clients(8)
    grown = dataclasses.replace(
        many[0], images=np.repeat(many[0].images, 9, axis=0), labels=np.repeat(many[0].labels, 9)
    )
    gone = dataclasses.replace(many[0], images=many[0].images[:0], labels=many[0].labels[:0])
    before = workers(few)
    assert set(before.values()) == {0, 1}
    for changed in (grown, gone):
        after = workers([changed, *many[1:]])
        assert all(before[first] == worker for first, worker in after.items())


@pytest.mark.planted_bug(9)
def test_unit_that_is_not_there_sends_no_other_to_another_worker():
    """Alone, a unit is there or not: those after it may not move up."""

    def workers(units):
        (slab,) = function.slabs(units, 0)
        return {
            share.data.images[start].tobytes(): number
            for number, share in enumerate(slab)
            for start in share.offsets[:-1]
        }

    plan = make_plan("poisson_gaussian")
    function = _function(mechanism=build_mechanism(plan, b"k" * 32, "r", 1, "0" * 64), workers=2)
    units = _clients(8)
    before = workers(units)
    assert set(before.values()) == {0, 1}
    after = workers(units[1:])
    assert len(after) == 7
    assert all(before[first] == worker for first, worker in after.items())


@pytest.mark.long
def test_sum_is_the_same_bits_for_any_spread_over_workers_and_slabs(monkeypatch):
    clients = _clients()
    expected, _ = _sum(_function(), clients)
    for workers in (2, 3):
        np.testing.assert_array_equal(_sum(_function(workers=workers), clients)[0], expected)
    monkeypatch.setattr(rounds_module, "SLAB_CLIENTS_PER_WORKER", 1)
    np.testing.assert_array_equal(_sum(_function(workers=2), clients[::-1])[0], expected)


@pytest.mark.long
def test_changing_one_user_changes_one_client_and_no_other_bit():
    function, clients = _function(workers=2), _clients()
    each = [_sum(function, [client])[0] for client in clients]
    whole, _ = _sum(function, clients)
    np.testing.assert_array_equal(sum(each), whole)
    changed = list(clients)
    victim = clients[2]  # one user leaves: fewer examples, fewer classes, other batch shapes
    keep = victim.labels != victim.labels[0]
    changed[2] = ClientExamples(0, 2, victim.images[keep], victim.labels[keep])
    difference = _sum(function, changed)[0] - whole
    np.testing.assert_array_equal(difference, _sum(function, [changed[2]])[0] - each[2])
    grid = 2.0**function.mechanism.plan.grid_bits
    assert 0 < np.linalg.norm(difference.astype(float)) <= 2 * grid


def test_seed_depends_on_round_grouping_and_group_only():
    function, client = _function(), _clients()[3]
    base, _ = _sum(function, [client])
    np.testing.assert_array_equal(_sum(function, [client])[0], base)
    for grouping, group, index in ((1, 3, 3), (0, 4, 3), (0, 3, 4)):
        other = ClientExamples(grouping, group, client.images, client.labels)
        assert not np.array_equal(_sum(function, [other], index)[0], base)


def test_labels_mean_nothing_outside_their_client():
    function, client = _function(), _clients()[4]
    _, rows = np.unique(client.labels, return_inverse=True)
    renamed = ClientExamples(0, 4, client.images, 1000 - 7 * rows.astype(np.int64))
    np.testing.assert_array_equal(_sum(function, [client])[0], _sum(function, [renamed])[0])


def test_nonfinite_update_counts_as_zero():
    function, clients = _function(), _clients(3)
    weights = function.initial_weights()
    weights[0] = np.nan
    sums = function(weights, clients, 0)
    assert not np.asarray(sums.total).any()
    assert not np.isfinite(sums.clients[:, 0]).any()


def test_empty_round_and_empty_client_give_zero():
    function = _function()
    nobody = ClientExamples(0, 7, np.zeros((0, SIZE, SIZE, 1), np.uint8), np.zeros(0, np.int64))
    for clients in ([], [nobody]):
        total, sums = _sum(function, clients)
        assert total.shape == (function.dim,)
        assert not total.any()
        assert sums.clients.shape == (0, 4)


def test_examples_beyond_the_cap_are_left_out():
    local = LOCAL.model_copy(update={"max_examples_per_client": 6})
    client = _clients()[4]
    short = ClientExamples(0, 4, client.images[:6], client.labels[:6])
    function = _function(local)
    np.testing.assert_array_equal(_sum(function, [client])[0], _sum(function, [short])[0])


@pytest.mark.long
def test_frozen_variables_are_not_part_of_the_update():
    backbone = build_backbone(
        ModelConfig(backbone="resnet8", image_size=SIZE, embedding_dim=DIM), 0
    )
    before = [w.copy() for w in backbone.get_weights()]
    variables = trainable_variables(backbone, "conv_frozen")
    function = RoundFunction(backbone, noiseless(), LOCAL, variables=variables)
    assert function.dim == sum(int(np.prod(v.shape)) for v in variables) < 2000
    total, _ = _sum(function, _clients(2))
    assert total.any()
    for old, new in zip(before, backbone.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_augmentation_and_triplets_train():
    local = LOCAL.model_copy(
        update={
            "loss": LossConfig(kind="triplet", margin=1.0),
            "augmentation": AugmentationConfig(),
            "epochs": 6,
        }
    )
    _, sums = _sum(_function(local), _clients()[3:])
    assert np.all(sums.clients[:, 0] > 0)
    assert np.mean(sums.clients[:, 2]) < np.mean(sums.clients[:, 1])


def test_shared_head_is_trained_clipped_and_summed_with_the_backbone():
    function = _function(mechanism=noiseless(clip=0.01), shared_head_rows=6)
    assert function.dim == _function().dim + 6 * DIM
    client = _clients()[2]
    _, rows = np.unique(client.labels, return_inverse=True)
    total, _ = _sum(function, [ClientExamples(0, 2, client.images, rows.astype(np.int64))])
    assert total[-6 * DIM :].any()
    assert np.linalg.norm(total.astype(float)) <= 2.0**function.mechanism.plan.grid_bits
    assert np.linalg.norm(total.astype(float)) > 0.999 * 2.0**function.mechanism.plan.grid_bits


def test_bfloat16_keeps_float32_weights_and_stays_close():
    backbone = build_backbone(MODEL, seed=1)
    exact = RoundFunction(backbone, noiseless(), LOCAL, seed=9)
    rough = RoundFunction(with_bfloat16(backbone), noiseless(), LOCAL, seed=9)
    np.testing.assert_array_equal(exact.initial_weights(), rough.initial_weights())
    one, two = (_sum(f, _clients())[0].astype(float) for f in (exact, rough))
    assert one @ two > 0.9 * np.linalg.norm(one) * np.linalg.norm(two)
    assert not np.array_equal(one, two)


def test_objective_shapes_name_the_update():
    backbone = build_backbone(MODEL, seed=1)
    objective = Objective(backbone, list(backbone.trainable_variables), LOCAL, 3)
    assert objective.shapes[-1] == (3, DIM)


def test_example_of_the_public_interface_runs():
    done = doctest.testmod(embedding)
    assert done.attempted > 10
    assert not done.failed


def test_head_and_slots_of_a_client_do_not_reach_the_next_one_or_the_next_round():
    function, clients = _function(), _clients()
    before, _ = _sum(function, [clients[4]])
    _sum(function, clients)
    for worker in function._workers:  # a leftover of a client makes later reads fail
        slots = [slot for each in worker.slots for slot in each]
        for variable in [*worker.weights, worker.head, *slots]:
            variable.assign(tf.fill(tf.shape(variable), np.nan))
    np.testing.assert_array_equal(_sum(function, [clients[4]])[0], before)
    assert not any("head" in v.path for v in function.objective.backbone.weights)
