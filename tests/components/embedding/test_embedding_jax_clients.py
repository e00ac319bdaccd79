"""DP-FedEmb on JAX: the records of TensorFlow, and bits that do not depend on other users."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedemb.config import ModelConfig, RunConfig
from fedemb.errors import ConfigError
from fedemb.models import keras_backend as backend
from fedemb.models.backbone_files import save_backbone
from fedemb.models.backbones import build_backbone, trainable_variables
from fedemb.models.inference import embed
from fedemb.models.keras_backend import use_backend
from fedemb.models.networks import NETWORKS
from fedemb.models.processor_forms import rewritten_for_cpu
from fedemb.training.tensorflow_clients import RoundFunction
from fedemb.training.units import UnitGradientFunction
from tests.kit.jax.cases import (
    CONFIG,
    LOCAL,
    MODEL,
    QUICK,
    ROUND,
    SEED,
    UNIT_MODEL,
    VARIANTS,
    clients,
    units,
)
from tests.kit.jax.without_tensorflow import said_on_jax
from tests.kit.pipeline_runs.training_run import classifier_config
from tests.kit.privacy_worlds import noiseless
from tests.kit.process import python

KINDS = ("jax_clients", "jax_units")
"""Modules of tests/kit/jax: DP-FedEmb, and DP-SGD."""
each_kind = pytest.mark.parametrize("kind", KINDS)


def _records(make, units):
    """A clip, statistics and records on TensorFlow; half of the records are clipped."""
    probe = make(1.0)
    first = probe(probe.initial_weights(), units, ROUND).clients
    clip = float(np.median(first[:, 0]))
    function = make(clip)
    weights = function.initial_weights()
    made = [np.asarray(function(weights, [unit], ROUND).total) for unit in units]
    return clip, first, np.stack(made)


@pytest.fixture(scope="module")
def backbone():
    return build_backbone(MODEL, 1)


@pytest.fixture(scope="module")
def records(backbone):
    """Of virtual clients that train in one of `VARIANTS`."""

    @cache
    def of(variant):
        local, rows = LOCAL.model_copy(update=VARIANTS[variant]), 3 * (variant == "shared")

        def make(clip):
            return RoundFunction(backbone, noiseless(clip), local, seed=SEED, shared_head_rows=rows)

        return _records(make, clients())

    return of


@pytest.fixture(scope="module")
def on_jax(backbone, records, tmp_path_factory):
    """What a process on JAX says of `sound`, `other` or `faulty` rounds of a kind."""

    @cache
    def on_jax(kind, what):
        folder, net, arrays = tmp_path_factory.mktemp(kind), backbone, {}
        if kind == "jax_clients":
            for variant in VARIANTS if what == "other" else QUICK:
                arrays[f"clip_{variant}"], _, arrays[f"records_{variant}"] = records(variant)
        else:
            net = build_backbone(UNIT_MODEL, 1)
            variables = trainable_variables(net, "all")

            def make(clip):
                mechanism = noiseless(clip)
                return UnitGradientFunction(net, mechanism, CONFIG, variables=variables, seed=SEED)

            arrays["clip"], _, arrays["records"] = _records(make, units())
        np.savez(folder / "records.npz", **arrays)
        save_backbone(net, folder / "backbone.keras")
        return said_on_jax(kind, what, folder)

    return on_jax


@pytest.mark.long
@each_kind
def test_rounds_without_leak_pass_and_compile_once(on_jax, kind):
    found = on_jax(kind, "sound")
    assert "refused" not in found, found["refused"]
    assert found["problems"] == []  # the same bits at any place and beside any neighbour
    assert found["compiled"] == 1  # rounds and clients of every size
    assert found["own draws"] == [True, True]  # of the group, and of the round
    assert found["empty"]
    assert found["nan"]


@pytest.mark.long
@pytest.mark.parametrize("variant", QUICK)
def test_jax_records_match_tensorflow_within_1e_5_of_the_clip(on_jax, variant):
    found = on_jax("jax_clients", "sound")
    assert max(found["apart"][variant]) <= 1e-5, found["apart"]


@pytest.mark.long
def test_jax_unit_records_match_tensorflow_with_at_most_one_outlier(on_jax):
    """An activation at its kink may flip by rounding and move a record further: one of nine."""
    apart = np.array(on_jax("jax_units", "sound")["apart"])
    assert np.sum(apart > 1e-5) <= 1, apart
    assert apart.max() < 1e-2, apart


@pytest.mark.long
def test_square_root_of_a_feature_that_is_zero_has_a_finite_slope(on_jax):
    np.testing.assert_allclose(on_jax("jax_units", "sound")["slope"], [0.0, 0.25])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in QUICK])
def test_jax_training_variants_match_tensorflow_records(on_jax, variant):
    apart = on_jax("jax_clients", "other")["apart"]
    assert max(apart[variant]) <= 1e-5, apart


@pytest.mark.long
def test_jax_statistics_match_tensorflow_and_padding_adds_nothing(on_jax, records):
    found = on_jax("jax_clients", "sound")
    np.testing.assert_allclose(found["statistics"], records("joint")[1], rtol=1e-4)
    assert found["anything"]


@pytest.mark.slow
@each_kind
def test_eight_devices_give_the_bits_of_one_and_bfloat16_keeps_the_clip(on_jax, kind):
    found = on_jax(kind, "other")
    assert found["devices"] == [True, True]
    wrong, cosine = found["bfloat16"]
    assert wrong == []
    assert 0.9 < cosine < 1.0


@pytest.mark.slow
def test_clipped_gradients_match_jax_privacy(on_jax):
    oracle = on_jax("jax_units", "other")["oracle"]
    assert max(oracle) <= 1e-5, oracle


@pytest.mark.slow
@each_kind
def test_leaking_rounds_are_refused_before_units_are_read(on_jax, kind):
    assert all("position in a batch of 4" in text for text in on_jax(kind, "faulty"))


@pytest.mark.long
def test_unsupported_jax_environments_are_refused_with_a_remedy(on_jax):
    found = on_jax("jax_units", "sound")
    assert "float64" in found["narrow"]
    assert "Lower training.unit_gradient.microbatch" in found["memory"]
    refused = found["refusals"]
    assert refused["alone"] == 8
    assert "this step is to have nvidia.com/gpu, but JAX finds only the CPU" in refused["promised"]
    assert "no NVIDIA driver found" in refused["promised"]
    assert "470.57.02', and CUDA 12 needs 525" in refused["old"]
    assert "(jax-cuda12-plugin, libtpu) and may take either" in refused["two"]


@pytest.mark.long
def test_pipeline_of_the_other_backend_is_refused(monkeypatch):
    monkeypatch.setenv("FEDEMB_BACKEND", "jax")
    with pytest.raises(ConfigError, match="images of this pipeline train on jax"):
        use_backend("tensorflow")


@pytest.mark.long
def test_gpu_kernels_are_set_to_deterministic():
    say = (
        "import os, fedemb.models.keras_backend as b; "
        "b.use_backend('jax'); print(os.environ['XLA_FLAGS'])"
    )
    for flags, wanted in (
        ("--xla_cpu_x=1", "--xla_cpu_x=1 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ):
        assert python("-c", say, env={"XLA_FLAGS": flags}).startswith(wanted)


@pytest.mark.long
def test_one_process_runs_one_backend():
    use_backend("tensorflow")
    with pytest.raises(ConfigError, match="Keras runs on tensorflow in this process"):
        use_backend("jax")


@pytest.mark.long
def test_missing_tensorflow_is_refused_with_the_setting_to_change(monkeypatch):
    """As in the images gpu and tpu."""
    monkeypatch.setattr(backend, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"not installed here; set training\.backend: jax"):
        use_backend("tensorflow")


@pytest.mark.long
def test_jax_backend_is_refused_for_unsupported_algorithms():
    assert classifier_config(**{"training.backend": "jax"}).training.backend == "jax"
    with pytest.raises(ValueError, match=r"backend=jax does not support .*=dp_covariance"):
        RunConfig.model_validate({"training": {"backend": "jax", "algorithm": "dp_covariance"}})


# ---- The core without TensorFlow: what it takes to train on another backend of Keras ----


SMALL = ("lenet", "resnet8_ws", "scatter_linear", "wrn_16_4")
"""Saved on TensorFlow, loaded on JAX: plain and standardised kernels, Fourier transforms."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What the other process prints."""
    folder = tmp_path_factory.mktemp("saved")
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    for name in SMALL:
        model = ModelConfig(backbone=name, image_size=16, channels=3, embedding_dim=16)
        backbone = build_backbone(model, 1)
        save_backbone(backbone, folder / f"{name}.keras")
        (folder / f"{name}.json").write_text(model.model_dump_json())
        np.save(folder / f"{name}.images.npy", images)
        np.save(folder / f"{name}.embeddings.npy", embed(backbone, images, 4))
    on_jax = python("-m", "tests.kit.jax.without_tensorflow", folder, env={"KERAS_BACKEND": "jax"})
    return [line.split() for line in on_jax.splitlines()]


@pytest.mark.slow
def test_all_backbones_are_built_without_tensorflow_installed(lines):
    assert [name for kind, name, *_ in lines if kind == "built"] == list(NETWORKS)


@pytest.mark.slow
def test_a_backbone_saved_on_tensorflow_embeds_alike_on_jax(lines):
    found = {name: float(far[0]) for kind, name, *far in lines if kind == "loaded"}
    assert found.keys() == set(SMALL)
    assert max(found.values()) < 1e-5, found


def test_starting_host_processes_keeps_the_keras_backend(monkeypatch):
    """A worker's environment goes to whatever its tests start."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    say = "import os, tests.kit.pipeline_runs.host_processes; print(dict(os.environ))"
    assert "KERAS_BACKEND" not in python("-c", say)


# ---- Convolutions and pooling in the forms of a processor ----


AXES = ("NHWC", "HWIO", "NHWC")
CASES = {
    "same": ((5, 5, 3, 4), {"padding": "SAME"}),
    "valid": ((3, 2, 3, 4), {"padding": "VALID"}),
    "stride": ((3, 3, 3, 4), {"padding": "SAME", "window_strides": (2, 2)}),
    "stride past the kernel": ((1, 1, 3, 4), {"padding": "VALID", "window_strides": (2, 3)}),
    "uneven padding": ((3, 3, 3, 4), {"padding": ((0, 2), (1, 0))}),
    "dilated": ((3, 3, 3, 4), {"padding": "SAME", "rhs_dilation": (2, 3)}),
    "depthwise": ((3, 3, 1, 3), {"padding": "SAME", "feature_group_count": 3}),
    "two kernels for each channel": ((3, 3, 1, 6), {"padding": "SAME", "feature_group_count": 3}),
}


def _convolution(shape, options):
    options = {"window_strides": (1, 1), "dimension_numbers": AXES, **options}
    return shape, lambda x, k: jax.lax.conv_general_dilated(x, k, **options)


def _pooling(window, strides):
    sizes = (1, *window, 1), (1, *strides, 1)
    return (1,), lambda x, k: k * jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *sizes, "VALID")


FUNCTIONS = {name: _convolution(*case) for name, case in CASES.items()} | {
    "pooling": _pooling((2, 2), (2, 2)),
    "pooling that leaves pixels": _pooling((3, 2), (3, 2)),
    "pooling of a function in jit": (
        (1,),
        lambda x, k: jax.jit(_pooling((2, 2), (2, 2))[1])(jax.nn.relu(x), k),
    ),
}


def _operations(function, *given):
    return {str(e.primitive) for e in jax.make_jaxpr(function)(*given).jaxpr.eqns}


def _inputs(shape, clients=3):
    random = np.random.default_rng(5)
    images = random.normal(size=(clients, 2, 11, 10, 3)).astype(np.float32)
    return images, random.normal(size=(clients, *shape)).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cpu_convolution_and_pooling_match_xla_values_and_gradients(name):
    shape, function = FUNCTIONS[name]
    images, kernels = _inputs(shape)
    formed = rewritten_for_cpu(function)

    def square(given):
        return lambda x, k: jnp.sum(jnp.square(given(x, k)))

    with jax.default_matmul_precision("highest"):
        gradients = tuple(jax.grad(square(f), (0, 1)) for f in (formed, function))
        for pair in ((formed, function), gradients):
            found, wanted = (jax.jit(jax.vmap(f))(images, kernels) for f in pair)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    used = _operations(formed, images[0], kernels[0])
    assert not {"conv_general_dilated", "reduce_window_max"} & used


def test_max_pooling_tie_has_the_same_gradient_as_xla():
    _, function = FUNCTIONS["pooling"]
    ties = jnp.ones((1, 4, 4, 1))
    wanted, found = (
        jax.grad(lambda x, f=f: jnp.sum(f(x, jnp.ones(1))))(ties)
        for f in (function, rewritten_for_cpu(function))
    )
    np.testing.assert_array_equal(found, wanted)


OTHERS = {
    "windows that overlap": _pooling((3, 3), (2, 2)),
    "two groups": _convolution((3, 3, 2, 4), {"padding": "SAME", "feature_group_count": 2}),
    "dilated images": _convolution(
        (3, 3, 4, 4), {"padding": ((1, 1), (1, 1)), "lhs_dilation": (2, 2)}
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_are_not_rewritten_for_processors(name):
    shape, function = OTHERS[name]
    given = jnp.ones((2, 8, 8, 4)), jnp.ones(shape)
    assert _operations(rewritten_for_cpu(function), *given) == _operations(function, *given)


def test_operations_are_not_rewritten_for_accelerators(monkeypatch):
    function = FUNCTIONS["same"][1]
    assert rewritten_for_cpu(function) is not function
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rewritten_for_cpu(function) is function
