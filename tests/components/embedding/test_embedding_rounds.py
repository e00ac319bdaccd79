"""The round function against a straightforward reference, and what one user can change."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from fedemb.config import (
    LocalTrainingConfig,
    LossConfig,
    ModelConfig,
    PretrainingConfig,
    ServerConfig,
    UnitGradientConfig,
)
from fedemb.errors import ArtifactError
from fedemb.models.backbones import build_backbone, trainable_variables, with_bfloat16
from fedemb.models.keras_backend import preprocess
from fedemb.models.losses import build_loss
from fedemb.privacy.running import build_mechanism
from fedemb.training import tensorflow_clients as rounds_module
from fedemb.training.central import pretrain
from fedemb.training.rounds import ClientExamples, Feed, RoundSums, TrainingRound, run_rounds
from fedemb.training.server import initial_state
from fedemb.training.tensorflow_clients import RoundFunction, first_head, gradients_summed_in_order
from fedemb.training.units import UnitGradientFunction
from tests.kit.privacy_worlds import ROOT, World, make_plan, noiseless
from tests.kit.process import python

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


def _workers(function, clients):
    """First image of each client -> its worker."""
    return {
        share.data.images[start].tobytes(): number
        for slab in function.slabs(clients, 0)
        for number, share in enumerate(slab)
        for start in share.offsets[:-1]
    }


@pytest.mark.planted_bug(9)
def test_removed_user_moves_no_other_client_between_workers():
    """Workers may differ in their floats, so sizes and empty clients decide nothing."""
    function, few, many = _function(workers=2), _clients(8), _clients(8)
    grown = dataclasses.replace(
        many[0], images=np.repeat(many[0].images, 9, axis=0), labels=np.repeat(many[0].labels, 9)
    )
    gone = dataclasses.replace(many[0], images=many[0].images[:0], labels=many[0].labels[:0])
    before = _workers(function, few)
    assert set(before.values()) == {0, 1}
    for changed in (grown, gone):
        after = _workers(function, [changed, *many[1:]])
        assert all(before[first] == worker for first, worker in after.items())


@pytest.mark.planted_bug(9)
def test_missing_unit_moves_no_other_between_workers():
    """Alone, a unit is there or not: those after it may not move up."""
    plan = make_plan("poisson_gaussian")
    function = _function(mechanism=build_mechanism(plan, b"k" * 32, "r", 1, "0" * 64), workers=2)
    units = _clients(8)
    before = _workers(function, units)
    assert set(before.values()) == {0, 1}
    after = _workers(function, units[1:])
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


def test_renaming_the_labels_of_a_client_does_not_change_its_update():
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


def test_shared_head_is_trained_clipped_and_summed_with_the_backbone():
    function = _function(mechanism=noiseless(clip=0.01), shared_head_rows=6)
    assert function.dim == _function().dim + 6 * DIM
    client = _clients()[2]
    _, rows = np.unique(client.labels, return_inverse=True)
    total, _ = _sum(function, [ClientExamples(0, 2, client.images, rows.astype(np.int64))])
    assert total[-6 * DIM :].any()
    assert np.linalg.norm(total.astype(float)) <= 2.0**function.mechanism.plan.grid_bits
    assert np.linalg.norm(total.astype(float)) > 0.999 * 2.0**function.mechanism.plan.grid_bits


@pytest.mark.long
def test_bfloat16_keeps_float32_weights_and_stays_close():
    backbone = build_backbone(MODEL, seed=1)
    exact = RoundFunction(backbone, noiseless(), LOCAL, seed=9)
    rough = RoundFunction(with_bfloat16(backbone), noiseless(), LOCAL, seed=9)
    np.testing.assert_array_equal(exact.initial_weights(), rough.initial_weights())
    one, two = (_sum(f, _clients())[0].astype(float) for f in (exact, rough))
    assert one @ two > 0.9 * np.linalg.norm(one) * np.linalg.norm(two)
    assert not np.array_equal(one, two)


def test_head_and_momentum_of_a_client_do_not_leak_into_other_clients():
    function, clients = _function(), _clients()
    before, _ = _sum(function, [clients[4]])
    _sum(function, clients)
    for worker in function._workers:  # a leftover of a client makes later reads fail
        slots = [slot for each in worker.slots for slot in each]
        for variable in [*worker.weights, worker.head, *slots]:
            variable.assign(tf.fill(tf.shape(variable), np.nan))
    np.testing.assert_array_equal(_sum(function, [clients[4]])[0], before)
    assert not any("head" in v.path for v in function.objective.backbone.weights)


# ---- Gradients are added up in one order: what TensorFlow runs holds no sum that takes any ----


MODEL_SUMS = ModelConfig(
    backbone="resnet8_ws", image_size=8, channels=3, embedding_dim=16, classes=tuple("abc")
)
"""Three gradients or more meet at its activations and kernels."""


def _function_sums(kind):
    mechanism = noiseless(1.0)
    net = build_backbone(MODEL_SUMS, 1)
    if kind == "clients":
        return RoundFunction(net, mechanism, LocalTrainingConfig())
    variables = trainable_variables(net, "all")
    return UnitGradientFunction(net, mechanism, UnitGradientConfig(), variables=variables)


def _sums_in_any_order(function):
    """How many there are after TensorFlow's optimizer of graphs, bodies of loops included."""
    import tensorflow as tf
    from tensorflow.python.grappler import tf_optimizer

    graph = function.get_concrete_function().graph
    found = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    for output in tf.nest.flatten(graph.structured_outputs):
        found.collection_def["train_op"].node_list.value.append(output.name)
    optimized = tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), found)
    nodes = [*optimized.node, *(n for f in optimized.library.function for n in f.node_def)]
    assert any(node.op == "AddN" for node in nodes)
    terms = [
        len([name for name in node.input if not name.startswith("^")])
        for node in nodes
        if node.op == "AddN"
    ]
    return sum(count > 2 for count in terms)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["clients", "units"])
def test_round_graph_contains_no_sum_of_undefined_order(kind):
    assert _sums_in_any_order(_function_sums(kind)._train) == 0


@pytest.fixture
def terms(monkeypatch):
    """How many terms TensorFlow was left to add up, inside `gradients_summed_in_order` alone."""
    from tensorflow.python.eager import backprop

    usual, seen = backprop._aggregate_grads, []
    monkeypatch.setattr(
        backprop, "_aggregate_grads", lambda given: seen.append(len(given)) or usual(given)
    )
    return seen


@pytest.mark.long
def test_pretraining_sums_gradients_in_a_fixed_order(terms):
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), np.uint8)
    schedule = PretrainingConfig(epochs=1, batch_size=4, learning_rate=0.1, augmentation=None)
    pretrain(build_backbone(MODEL_SUMS, 1), images, np.arange(8) % 2, schedule, seed=0)
    assert max(terms) == 2


def test_ordered_gradients_match_tensorflow_and_the_patch_is_undone(terms):
    import tensorflow as tf

    x = tf.constant(np.random.default_rng(0).normal(size=100).astype(np.float32))

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x)
            value = tf.reduce_sum(x * x + tf.cos(x) * y + tf.exp(y))
        return tape.gradient(value, x)

    usual = gradient()
    with gradients_summed_in_order():
        np.testing.assert_allclose(gradient(), usual, rtol=1e-5, atol=1e-6)
    assert terms == [2]  # of y; x has five
    np.testing.assert_array_equal(gradient(), usual)
    assert terms == [2]


# ---- Virtual clients are made a little ahead of the training that uses them ----


class _Packer:
    """Packs every client into a slab of its own."""

    def slabs(self, clients, number):
        for client in clients:
            yield (number, client.group)


def _feed(sample, load, rounds=3):
    mechanism = SimpleNamespace(sample_clients=sample, plan=SimpleNamespace(rounds=rounds))
    return Feed(_Packer(), mechanism, first=0, index=None, load=load)


def test_feed_yields_rounds_in_order_with_limited_prefetch():
    loaded = []
    clients = [SimpleNamespace(group=g) for g in range(5)]
    load = lambda client: loaded.append(client.group) or client  # noqa: E731
    with _feed(lambda n, _: clients, load) as feed:
        for number in range(3):
            for place, slab in enumerate(feed.next_round()):
                assert slab == (number, place)
                assert len(loaded) <= 5 * number + place + 5


def test_error_while_loading_reaches_the_trainer():
    def fail(client):
        raise ArtifactError("a shard is damaged")

    with (
        _feed(lambda n, _: [SimpleNamespace(group=0)], fail) as feed,
        pytest.raises(ArtifactError, match="damaged"),
    ):
        list(feed.next_round())


def test_all_clients_of_a_round_are_prepared_before_one_is_loaded():
    seen = []
    clients = [SimpleNamespace(group=g) for g in range(3)]

    def load(client):
        seen.append(client.group)
        return client

    mechanism = SimpleNamespace(sample_clients=lambda *_: clients, plan=SimpleNamespace(rounds=1))
    prepare = lambda round_clients: seen.append(len(round_clients))  # noqa: E731
    with Feed(_Packer(), mechanism, first=0, index=None, load=load, prepare=prepare) as feed:
        list(feed.next_round())
    assert seen == [3, 0, 1, 2]


def test_feed_stops_with_the_trainer():
    before = threading.active_count()
    clients = [SimpleNamespace(group=g) for g in range(9)]
    with _feed(lambda n, _: clients, lambda client: client):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


class _Nobody(TrainingRound):
    """Rounds whose virtual clients have no examples."""

    def initial_weights(self):
        return np.zeros(self.dim, np.float32)

    def slabs(self, units, round_index):
        return iter(() if all(len(unit.users) == 0 for unit in units) else (1,))

    def _sums(self, weights, slabs):
        assert not list(slabs)
        return RoundSums(np.zeros(self.dim, np.int64), np.zeros((0, 4), np.float32))


@pytest.mark.planted_bug(12)
def test_a_round_without_participants_is_noised_and_committed_like_any_other():
    """Left out, it would show that nobody was sampled."""
    plan, committed = make_plan(), []
    mechanism = build_mechanism(plan, ROOT, "run", 0, "inputs")
    function, world = _Nobody(mechanism, 5), World((), plan.virtual_clients)
    state, load = initial_state(function.initial_weights()), lambda client: client
    commit = lambda number, output: committed.append((number, output))  # noqa: E731
    with Feed(function, mechanism, first=0, index=world, load=load) as feed:
        rounds = list(run_rounds(function, mechanism, ServerConfig(), state, feed, commit=commit))
    assert [number for number, _ in committed] == list(range(plan.rounds))
    assert all(output.mean.all() for _, output in committed)
    assert rounds[-1].state.rounds == plan.rounds


# ---- Clients spread over devices: any number of them gives the same integer sum, bit for bit ----


SCRIPT = """
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
from fedemb.config import LocalTrainingConfig, ModelConfig
from fedemb.training.rounds import ClientExamples
from fedemb.training.tensorflow_clients import RoundFunction
from fedemb.models.backbones import build_backbone
from fedemb.models.keras_backend import configure_threads
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
from fedemb.privacy.running import build_mechanism

configure_threads(4)
names = [device.name for device in tf.config.list_logical_devices("CPU")]
plan = GroupPoissonGaussian(rounds=1, l2_norm_clip=0.1, noise_multiplier=0.0,
                  virtual_clients=9, groupings=1, sampling_probability=1.0)
random = np.random.default_rng(0)
clients = [
    ClientExamples(0, group, random.integers(0, 256, (5 + group, 12, 12, 1), np.uint8),
                   random.integers(0, 3, 5 + group))
    for group in range(9)
]
for count in (1, 2, 4):
    mechanism = build_mechanism(plan, bytes(32), "run", 1, "0" * 64)
    backbone = build_backbone(ModelConfig(backbone="tiny", image_size=12, embedding_dim=8), 0)
    function = RoundFunction(backbone, mechanism, LocalTrainingConfig(batch_size=4), seed=1,
                             workers=count, devices=names[:count])
    used = {worker.weights[0].device for worker in function._workers}
    sums = function(function.initial_weights(), clients, 0)
    digest = mechanism.aggregate(0, sums.total).sums_sha
    print("devices", len(used), digest)
"""


@pytest.mark.slow
def test_one_two_and_four_devices_give_the_same_sum():
    said = python("-c", SCRIPT).splitlines()
    lines = [line.split() for line in said if line.startswith("devices")]
    assert [line[1] for line in lines] == ["1", "2", "4"]
    assert len({line[2] for line in lines}) == 1
