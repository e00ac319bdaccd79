import keras
import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.backbones import build_backbone, check_backbone, trainable_variables
from fedemb.models.inference import embed
from fedemb.models.layers import plain_form
from fedemb.models.scattering import PATHS, scattering_layer
from fedemb.training.server import pack, unpack


def _count(variables):
    return int(sum(np.prod(v.shape) for v in variables))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "channels", "features", "parameters"),
    [
        ("lenet", 28, 1, None, 453_632),
        ("mobilenetv2", 32, 3, None, 2_387_840),
        ("resnet8", 32, 3, None, 85_712),
        ("resnet8_ws", 32, 3, None, 85_712),
        ("resnet8_s2", 28, 1, None, 163_680),
        ("tanh_cnn", 32, 3, 2048, 287_008),  # of DP-SGD, without a head
        ("wrn_16_4", 32, 3, 256, 2_750_832),
    ],
)
def test_backbone_has_the_published_size(name, size, channels, features, parameters):
    model = ModelConfig(backbone=name, image_size=size, channels=channels)
    if features is not None:
        model = model.model_copy(update={"projection": False, "embedding_dim": features})
    backbone = build_backbone(model, seed=0)
    assert _count(trainable_variables(backbone, "all")) == parameters
    assert not backbone.non_trainable_variables


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "channels", "group", "parameters"),
    [("mobilenetv2", 32, 3, "conv_frozen", 198_080), ("lenet", 28, 1, "projection", 401_536)],
)
def test_freezing_leaves_the_named_group(name, size, channels, group, parameters):
    model = ModelConfig(backbone=name, image_size=size, channels=channels)
    assert _count(trainable_variables(build_backbone(model, 0), group)) == parameters


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="head leaves nothing"):
        trainable_variables(build_backbone(ModelConfig(backbone="lenet"), 0), "head")


def test_initial_weights_depend_on_the_seed_alone():
    model = ModelConfig(backbone="tiny")
    first, again, other = (build_backbone(model, seed).get_weights() for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (keras.layers.BatchNormalization(), "mixes the images of different users"),
        (keras.layers.Dropout(0.5), "every seed must depend on the virtual client alone"),
    ],
)
def test_batch_norm_and_dropout_are_refused(layer, words):
    model = ModelConfig(backbone="own:model", embedding_dim=4)
    inputs = keras.Input((model.image_size, model.image_size, model.channels))
    outputs = keras.layers.Dense(model.embedding_dim)(layer(keras.layers.Flatten()(inputs)))
    with pytest.raises(ConfigError, match=words):
        check_backbone(keras.Model(inputs, outputs), model)


def test_unknown_and_misfit_backbones_are_refused():
    with pytest.raises(ConfigError, match="take one of lenet, mobilenetv2"):
        build_backbone(ModelConfig(backbone="alexnet"), 0)
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_backbone(ModelConfig(backbone="no_such_module:build"), 0)
    backbone = build_backbone(ModelConfig(backbone="tiny"), 0)
    with pytest.raises(ConfigError, match=r"set model\.image_size"):
        check_backbone(backbone, ModelConfig(backbone="tiny", embedding_dim=64))


def test_embeddings_have_unit_length_and_do_not_depend_on_the_batch():
    backbone = build_backbone(ModelConfig(backbone="resnet8", channels=3), 0)
    images = np.random.default_rng(0).integers(0, 256, (11, 28, 28, 3), np.uint8)
    together = embed(backbone, images, batch_size=4)
    assert together.shape == (11, 128)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(together[:5], embed(backbone, images[:5], batch_size=4))


def _standardized():
    model = ModelConfig(backbone="resnet8_ws", image_size=16, embedding_dim=8)
    return model, build_backbone(model, 3)


@pytest.mark.long
def test_standardised_weights_ignore_mean_and_scale_of_a_kernel():
    model, backbone = _standardized()
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 1), np.uint8)
    before = embed(backbone, images)
    kernel = backbone.get_layer("block2_1_conv1").kernel
    kernel.assign(3.0 * kernel + 0.5)
    np.testing.assert_allclose(embed(backbone, images), before, atol=1e-4)
    plain = build_backbone(model.model_copy(update={"backbone": "resnet8"}), 3)
    plain.set_weights(backbone.get_weights())
    assert np.abs(embed(plain, images) - before).max() > 1e-2


@pytest.mark.long
def test_standardised_backbone_is_released_in_ordinary_layers(tmp_path):
    model, backbone = _standardized()
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 1), np.uint8)
    released = plain_form(backbone)
    kinds = {type(layer).__name__ for layer in released.layers}
    assert "StandardizedConv2D" not in kinds
    assert [v.path for v in released.weights] == [v.path for v in backbone.weights]
    np.testing.assert_allclose(embed(released, images), embed(backbone, images), atol=1e-5)
    save_backbone(backbone, tmp_path / "backbone.keras")
    again = load_backbone(tmp_path / "backbone.keras", model)
    np.testing.assert_array_equal(embed(again, images), embed(backbone, images))
    ordinary = build_backbone(ModelConfig(backbone="tiny"), 0)
    assert plain_form(ordinary) is ordinary


# ---- The scattering transform against its definition, and the frozen nets made of it ----


_BORDER = 4


def _wavelet(size, octave, direction):
    """Morlet wavelet around the origin of a torus, summed over its copies, pixel by pixel."""
    angle, spread = np.pi * direction / 8, 0.8 * 2**octave
    copies = size * np.arange(-3, 4)
    rows = (np.arange(size)[:, None] + copies)[:, None, :, None]
    columns = (np.arange(size)[:, None] + copies)[None, :, None, :]
    along = np.cos(angle) * rows + np.sin(angle) * columns
    across = np.cos(angle) * columns - np.sin(angle) * rows
    bell = np.exp(-(along**2 + across**2 / 4) / (2 * spread**2))
    wave = bell * np.exp(0.75j * np.pi / 2**octave * along)
    wave = wave - bell * wave.sum() / bell.sum()
    return wave.sum((2, 3)) / (4 * np.pi * spread**2)


def _around(image, kernel):
    """The circular convolution, term by term."""
    size = len(image)
    result = np.zeros(image.shape, complex)
    for row in range(size):
        for column in range(size):
            result += kernel[row, column] * np.roll(image, (row, column), (0, 1))
    return result


def _blurred(signal, step):
    """Gaussian means at the middle of each 4x4 square of the image inside the border."""
    at = np.arange(-_BORDER, signal.shape[0] * step - _BORDER, step)
    middles = np.arange(1.5, signal.shape[0] * step - 2 * _BORDER, 4)
    weights = np.exp(-(((middles[:, None] - at) / 1.6) ** 2) / 2)
    weights /= weights.sum(1, keepdims=True)
    return np.einsum("ar,bc,rc->ab", weights, weights, signal)


def _by_definition(image):
    """All paths of one channel in the order of the layer, float64 `[size / 4, size / 4, 81]`."""
    padded = np.pad(image.astype(np.float64), _BORDER, mode="reflect")
    waves = [[_wavelet(len(padded), j, direction) for direction in range(8)] for j in range(2)]
    fine = [np.abs(_around(padded, wave)) for wave in waves[0]]
    paths = [_blurred(padded, 1)]
    paths += [_blurred(signal, 1) for signal in fine]
    paths += [_blurred(np.abs(_around(padded, wave))[::2, ::2], 2) for wave in waves[1]]
    paths += [
        _blurred(np.abs(_around(signal, wave))[::2, ::2], 2) for signal in fine for wave in waves[1]
    ]
    return np.stack(paths, axis=-1)


def _layer(images):
    return scattering_layer()()(images).numpy()


@pytest.mark.long
def test_scattering_layer_equals_its_definition():
    """Against wavelets summed pixel by pixel: no Fourier transform and no folding of spectra."""
    images = np.random.default_rng(0).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    found = _layer(images).reshape(2, 3, 3, 3, PATHS)
    for image in range(2):
        for channel in range(3):
            wanted = _by_definition(images[image, :, :, channel])
            np.testing.assert_allclose(found[image, :, :, channel], wanted, atol=2e-6)


def _model(name, **options):
    return ModelConfig(backbone=name, image_size=32, channels=3, **options)


def test_scatter_linear_is_frozen_and_its_classifier_trains_a_head_alone():
    model = _model("scatter_linear", projection=False, embedding_dim=15_552, classes=("a", "b"))
    trained = trainable_variables(build_backbone(model, 0), "all")
    assert [v.path for v in trained] == ["logits/kernel", "logits/bias"]
    assert not any(v.numpy().any() for v in trained)  # from zero


def test_scattering_features_are_normalized_and_ignore_contrast():
    """Each group of paths is normalised by itself, and small groups are not flattened."""
    model = _model("scatter_linear", projection=False, embedding_dim=15_552)
    backbone = build_backbone(model, 0)
    image = np.random.default_rng(2).uniform(-1, 1, (1, 32, 32, 3)).astype(np.float32)
    groups = backbone(image).numpy().reshape(64, 27, 9)
    np.testing.assert_allclose(groups.mean((0, 2)), 0.0, atol=1e-3)
    np.testing.assert_allclose(groups.std((0, 2)), 1.0, atol=1e-3)
    np.testing.assert_allclose(backbone(0.5 * image), backbone(image), atol=1e-2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"image_size": 30}, "is not a multiple of 4"), ({"norm_groups": 10}, "does not divide")],
)
def test_invalid_scattering_settings_are_refused(options, sentence):
    model = _model("scatter_linear").model_copy(update=options)
    with pytest.raises(ConfigError, match=sentence):
        build_backbone(model, 0)


def test_mirrored_features_are_equal_for_an_image_and_its_mirror_image():
    images = np.random.default_rng(4).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    layer = scattering_layer()(mirrored=True)
    found, other = layer(images).numpy(), layer(images[:, :, ::-1]).numpy()
    assert found.shape == (2, 8, 4, 243)
    assert np.linalg.norm(found - other) < 0.01 * np.linalg.norm(found)
    upside = layer(images[:, ::-1]).numpy()
    assert np.linalg.norm(found - upside) > 0.1 * np.linalg.norm(found)


# ---- Working state in one file: as it was, or a ValueError ----


ARRAYS = {"weights": np.arange(3, dtype=np.float32), "none": np.zeros((0, 2))}
PACKED = pack({"rounds": 7, "tags": ["é"]}, ARRAYS)


def test_packed_arrays_are_unpacked_unchanged():
    head, arrays = unpack(PACKED, *ARRAYS)
    assert head == {"rounds": 7, "tags": ["é"]}
    assert all(np.array_equal(arrays[name], value) for name, value in ARRAYS.items())
    assert all(arrays[name].dtype == value.dtype for name, value in ARRAYS.items())


@pytest.mark.parametrize("length", range(0, len(PACKED), 29))
def test_truncated_packed_state_is_a_value_error(length):
    with pytest.raises(ValueError, match="packed state"):
        unpack(PACKED[:length], *ARRAYS)


def test_missing_array_is_a_value_error():
    with pytest.raises(ValueError, match="packed state"):
        unpack(PACKED, "momentum")
