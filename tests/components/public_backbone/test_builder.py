"""Networks built from state dicts: folding is exact, and a wrong state dict is one sentence."""

import numpy as np
import pytest

from fedemb.errors import ArtifactError
from fedemb.models.public_backbone.builder import Builder
from fedemb.models.public_backbone.pixels import IMAGENET, Pixels, image_input


def _tensors(random, depthwise):
    channels = 1 if depthwise else 3
    count = 3 if depthwise else 5
    return {
        "conv.weight": random.normal(size=(count, channels, 3, 3)).astype(np.float32),
        "bn.weight": random.uniform(0.5, 1.5, count).astype(np.float32),
        "bn.bias": random.normal(size=count).astype(np.float32),
        "bn.running_mean": random.normal(size=count).astype(np.float32),
        "bn.running_var": random.uniform(0.1, 2, count).astype(np.float32),
        "bn.num_batches_tracked": np.array(9),
        "fc.weight": np.zeros((2, 5), np.float32),
    }


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("padding", ["same", 1])
def test_folded_batch_norm_is_the_same_function(depthwise, padding):
    import keras

    tensors = _tensors(np.random.default_rng(0), depthwise)
    build = Builder(tensors, "net.pth")
    inputs = keras.Input((9, 9, 3))
    x = build.convolution(inputs, "c", "conv", "bn", 2, padding, epsilon=1e-3, depthwise=depthwise)
    net = build.finished(inputs, x, "net", ["fc."])

    images = np.random.default_rng(1).normal(size=(2, 9, 9, 3)).astype(np.float32)
    y = images if padding == "same" else np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    kernel = tensors["conv.weight"]
    kind = keras.layers.DepthwiseConv2D if depthwise else keras.layers.Conv2D
    size = (3,) if depthwise else (5, 3)
    settings = {"strides": 2, "padding": "same" if padding == "same" else "valid"}
    convolution = kind(*size, use_bias=False, **settings)
    norm = keras.layers.BatchNormalization(epsilon=1e-3)
    norm.build((None, None, None, len(kernel)))
    norm.set_weights(
        [tensors[f"bn.{part}"] for part in ("weight", "bias", "running_mean", "running_var")]
    )
    convolution.build(y.shape)
    convolution.set_weights([kernel.transpose(2, 3, *((0, 1) if depthwise else (1, 0)))])
    wanted = norm(convolution(y), training=False)
    np.testing.assert_allclose(net(images), wanted, rtol=1e-4, atol=1e-5)


def _changed(name, array=None):
    tensors = _tensors(np.random.default_rng(0), False)
    if array is None:
        del tensors[name]
    else:
        tensors[name] = array
    return tensors


WRONG = {
    "missing": (_changed("bn.bias"), "has no tensor 'bn.bias'"),
    "shape": (_changed("bn.bias", np.zeros(4)), r"shape \[4\], expected \[5\]"),
    "rank": (_changed("conv.weight", np.zeros((5, 3))), r"shape \[5, 3\], expected"),
    "nan": (_changed("bn.bias", np.full(5, np.nan)), "NaN or infinite weights"),
    "infinite": (_changed("bn.bias", np.full(5, np.inf)), "NaN or infinite weights"),
    "further": (_changed("conv2.weight", np.zeros(1)), "'conv2.weight', which this architecture"),
}


@pytest.mark.parametrize("name", WRONG)
def test_state_dict_of_something_else_is_one_sentence(name):
    import keras

    tensors, message = WRONG[name]
    build, inputs = Builder(tensors, "net.pth"), keras.Input((9, 9, 3))
    with pytest.raises(ArtifactError, match=message):
        build.finished(inputs, build.convolution(inputs, "c", "conv", "bn"), "net", ["fc."])


@pytest.mark.parametrize("pixels", [IMAGENET, Pixels((127.0,) * 3, (128.0,) * 3)])
def test_first_layer_makes_the_trained_pixels_of_what_the_pipeline_gives(pixels):
    import keras

    from fedemb.models.preprocessing import preprocess

    raw = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    found = keras.Model(*image_input(4, pixels))(preprocess(raw))
    wanted = (raw - np.array(pixels.mean)) / np.array(pixels.deviation)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert ("[" in str(pixels)) == (pixels is IMAGENET)
