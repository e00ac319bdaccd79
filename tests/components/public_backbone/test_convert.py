"""State dicts in timm's naming: converted networks compute what PyTorch's would.

The references here are written with plain operations, for tiny networks of random weights.
`make test-timm` compares networks of full size with timm itself.
"""

import json
import math
import struct

import numpy as np
import pytest

from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.models.preprocessing import preprocess
from fedemb.models.public_backbone.convert import convert_tensors
from fedemb.models.public_backbone.pixels import HALF, IMAGENET
from fedemb.models.public_backbone.resnet import resnet50
from fedemb.models.public_backbone.safetensors_file import read_safetensors
from fedemb.models.public_backbone.vision_transformer import vision_transformer
from tests.kit.torch_files import tensors_of, write_zip


class _Draws:
    """Random tensors of a state dict."""

    def __init__(self):
        self.random, self.state = np.random.default_rng(0), {}

    def kernel(self, name, *shape):
        scale = (1 / math.prod(shape[1:])) ** 0.5
        self.state[f"{name}.weight"] = self.random.normal(0, scale, shape).astype(np.float32)

    def vector(self, name, count):
        self.state[name] = self.random.uniform(0.3, 0.9, count).astype(np.float32)

    def norm(self, name, count, statistics=True):
        parts = ("weight", "bias", "running_mean", "running_var")
        for part in parts if statistics else parts[:2]:
            self.vector(f"{name}.{part}", count)

    def dense(self, name, outputs, inputs):
        self.kernel(name, outputs, inputs)
        self.vector(f"{name}.bias", outputs)


def _resnet_state():
    draw = _Draws()
    draw.kernel("conv1", 4, 3, 7, 7)
    draw.norm("bn1", 4)
    inputs = 4
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        width = 2 * stage
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for number, shape in enumerate(
                ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)), start=1
            ):
                draw.kernel(f"{name}.conv{number}", *shape)
                draw.norm(f"{name}.bn{number}", shape[0])
            if block == 0:
                draw.kernel(f"{name}.downsample.0", 4 * width, inputs, 1, 1)
                draw.norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    draw.dense("fc", 10, inputs)
    return draw.state


def _resnet(state, x):
    """ResNet-50 in evaluation mode; the stride is in the 3 x 3 convolution."""
    import tensorflow as tf

    def conv(x, name, norm, stride, pad):
        x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        kernel = state[f"{name}.weight"].transpose(2, 3, 1, 0)
        x = tf.nn.conv2d(x, kernel, stride, "VALID").numpy()
        gamma, beta, mean, variance = (
            state[f"{norm}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta

    x = np.maximum(conv(x, "conv1", "bn1", 2, 3), 0)
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    x = tf.nn.max_pool2d(x, 3, 2, "VALID").numpy()
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = np.maximum(conv(x, f"{name}.conv1", f"{name}.bn1", 1, 0), 0)
            y = np.maximum(conv(y, f"{name}.conv2", f"{name}.bn2", stride, 1), 0)
            y = conv(y, f"{name}.conv3", f"{name}.bn3", 1, 0)
            if block == 0:
                x = conv(x, f"{name}.downsample.0", f"{name}.downsample.1", stride, 0)
            x = np.maximum(x + y, 0)
    return x.mean((1, 2))


def _close(found, wanted):
    assert np.abs(np.asarray(found) - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_resnet50_is_the_same_function():
    state = _resnet_state()
    net, taps = resnet50(state, 64, "net.pth", IMAGENET)
    raw = np.random.default_rng(1).integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    prepared = (raw - np.array(IMAGENET.mean)) / np.array(IMAGENET.deviation)
    _close(net(preprocess(raw)), _resnet(state, prepared.astype(np.float32)))
    assert all(net.get_layer(layer) for layer in taps.values())


WIDTH, PATCH, SIDE = 12, 4, 4


def _transformer_state(layer_scale):
    draw = _Draws()
    draw.kernel("patch_embed.proj", WIDTH, 3, PATCH, PATCH)
    draw.vector("patch_embed.proj.bias", WIDTH)
    draw.state["cls_token"] = draw.random.normal(size=(1, 1, WIDTH)).astype(np.float32)
    positions = draw.random.normal(size=(1, SIDE * SIDE + 1, WIDTH))
    draw.state["pos_embed"] = positions.astype(np.float32)
    for block in range(12):
        name = f"blocks.{block}"
        draw.norm(f"{name}.norm1", WIDTH, statistics=False)
        draw.dense(f"{name}.attn.qkv", 3 * WIDTH, WIDTH)
        draw.dense(f"{name}.attn.proj", WIDTH, WIDTH)
        draw.norm(f"{name}.norm2", WIDTH, statistics=False)
        draw.dense(f"{name}.mlp.fc1", 4 * WIDTH, WIDTH)
        draw.dense(f"{name}.mlp.fc2", WIDTH, 4 * WIDTH)
        for number in (1, 2) if layer_scale else ():
            draw.vector(f"{name}.ls{number}.gamma", WIDTH)
    draw.norm("norm", WIDTH, statistics=False)
    draw.dense("head", 10, WIDTH)
    return draw.state


def _transformer(state, x):
    """A vision transformer of six heads, without interpolation of positions."""
    error = np.vectorize(math.erf)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    def dense(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def attention(x, name):
        batch, tokens, width = x.shape
        split = dense(x, f"{name}.qkv").reshape(batch, tokens, 3, 6, width // 6)
        query, key, value = split.transpose(2, 0, 3, 1, 4)
        scores = np.exp(query @ key.transpose(0, 1, 3, 2) / np.sqrt(width // 6))
        mixed = scores / scores.sum(-1, keepdims=True) @ value
        return dense(mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width), f"{name}.proj")

    batch, side = len(x), x.shape[1] // PATCH
    patches = x.reshape(batch, side, PATCH, side, PATCH, 3).transpose(0, 1, 3, 5, 2, 4)
    kernel = state["patch_embed.proj.weight"].reshape(WIDTH, -1)
    x = patches.reshape(batch, side * side, -1) @ kernel.T + state["patch_embed.proj.bias"]
    token = np.broadcast_to(state["cls_token"], (batch, 1, WIDTH))
    x = np.concatenate([token, x], axis=1) + state["pos_embed"]
    for block in range(12):
        name = f"blocks.{block}"
        first, second = (state.get(f"{name}.ls{number}.gamma", 1.0) for number in (1, 2))
        x = x + first * attention(norm(x, f"{name}.norm1"), f"{name}.attn")
        y = dense(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        y = y * (1 + error(y / np.sqrt(2))) / 2
        x = x + second * dense(y, f"{name}.mlp.fc2")
    return norm(x, "norm")[:, 0]


@pytest.mark.parametrize("layer_scale", [False, True])
def test_vision_transformer_is_the_same_function(layer_scale):
    state = _transformer_state(layer_scale)
    net, taps = vision_transformer(state, PATCH * SIDE, "net.pth", "vit", PATCH, HALF)
    raw = np.random.default_rng(1).integers(0, 256, (2, 16, 16, 3)).astype(np.uint8)
    _close(net(preprocess(raw)), _transformer(state, (raw - 127.5) / 127.5))
    assert all(net.get_layer(layer) for layer in taps.values())


def test_positions_of_another_size_are_interpolated():
    """Constant positions stay constant, and the class token keeps its own."""
    state = _transformer_state(False)
    state["pos_embed"][:, 1:] = 0.25
    net, _ = vision_transformer(state, 32, "net.pth", "vit", PATCH, HALF)
    token, positions = net.get_layer("stem_token").get_weights()
    np.testing.assert_array_equal(token, state["cls_token"])
    np.testing.assert_array_equal(positions[:, 0], state["pos_embed"][:, 0])
    np.testing.assert_allclose(positions[:, 1:], 0.25, rtol=1e-6)
    assert positions.shape == (1, 65, WIDTH)


def test_size_that_the_patch_does_not_divide_is_one_sentence():
    with pytest.raises(ConfigError, match="such as --size 16"):
        vision_transformer(_transformer_state(False), 18, "net.pth", "vit", PATCH, HALF)


def _safetensors(path, tensors, **changes):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (kind, array) in tensors.items():
        start = len(data)
        data += array.tobytes()
        offsets = [start, len(data)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
    header.get("a", {}).update(changes)
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data)
    return path


NUMBERS = {
    "a": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "b": ("F16", np.array([0.5, -1], np.float16)),
    "c": ("I64", np.array(3, np.int64)),
}


def test_safetensors_are_read(tmp_path):
    tensors = {**NUMBERS, "d": ("BF16", np.array([0x3FC0], "<u2"))}
    found = read_safetensors(_safetensors(tmp_path / "x.safetensors", tensors))
    for name, (_, array) in NUMBERS.items():
        np.testing.assert_array_equal(found[name], array)
    np.testing.assert_array_equal(found["d"], [1.5])


WRONG = {
    "outside": {"data_offsets": [0, 1 << 40]},
    "larger shape": {"shape": [1 << 40]},
    "negative": {"shape": [-2, -3]},
    "unknown type": {"dtype": "F8"},
    "no list": {"shape": 6},
}


@pytest.mark.parametrize("name", WRONG)
def test_safetensors_that_contradict_themselves_are_one_sentence(tmp_path, name):
    path = _safetensors(tmp_path / "x.safetensors", NUMBERS, **WRONG[name])
    with pytest.raises(ArtifactError, match="not a readable safetensors file") as refused:
        read_safetensors(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]"]
)
def test_what_is_not_safetensors_is_one_sentence(tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError) as refused:
        read_safetensors(tmp_path / "x.safetensors")
    assert "\n" not in str(refused.value)


def test_file_of_another_architecture_is_one_sentence(tmp_path):
    path = write_zip(tmp_path / "net.pth", tensors_of({"a": np.zeros(3, np.float32)}))
    with pytest.raises(ArtifactError, match=r"has no tensor 'conv1.weight'.*--architecture"):
        convert_tensors(path, "resnet50", None, None)
    with pytest.raises(ConfigError, match="--architecture is 'resnet51'"):
        convert_tensors(path, "resnet51", None, None)
    with pytest.raises(ConfigError, match=r"--pixels is '0\.\.2'"):
        convert_tensors(path, "resnet50", None, "0..2")
    with pytest.raises(InputError, match="does not exist"):
        convert_tensors(tmp_path / "none.safetensors", "resnet50", None, None)
