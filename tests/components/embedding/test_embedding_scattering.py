"""The scattering transform against its definition, and the frozen nets made of it."""

import numpy as np
import pytest

from fedemb.config import ModelConfig
from fedemb.errors import ConfigError
from fedemb.models.keras_backend import preprocess
from fedemb.models.scattering import PATHS, mirrored_paths, scattering_layer
from fedemb.training import build_backbone, load_backbone, save_backbone, trainable_variables

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
def test_layer_computes_the_definition():
    """Against wavelets summed pixel by pixel: no Fourier transform and no folding of spectra."""
    images = np.random.default_rng(0).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    found = _layer(images).reshape(2, 3, 3, 3, PATHS)
    for image in range(2):
        for channel in range(3):
            wanted = _by_definition(images[image, :, :, channel])
            np.testing.assert_allclose(found[image, :, :, channel], wanted, atol=2e-6)


def test_constant_image_has_nothing_but_its_mean():
    found = _layer(np.full((1, 16, 16, 1), 0.3, np.float32))
    np.testing.assert_allclose(found[..., 0], 0.3, atol=1e-6)
    np.testing.assert_allclose(found[..., 1:], 0.0, atol=1e-6)


def test_mirrored_image_has_mirrored_features():
    """But for the aliasing of a signal sampled at every second pixel."""
    images = np.random.default_rng(1).uniform(-1, 1, (4, 32, 32, 1)).astype(np.float32)
    found, mirrored = _layer(images), _layer(images[:, :, ::-1])
    turned = mirrored[:, :, ::-1, mirrored_paths()]
    error = np.linalg.norm(turned - found) / np.linalg.norm(found)
    unturned = np.linalg.norm(mirrored[:, :, ::-1] - found) / np.linalg.norm(found)
    assert error < 0.02
    assert unturned > 0.1


def _model(name, **options):
    return ModelConfig(backbone=name, image_size=32, channels=3, **options)


def test_scatter_linear_is_frozen_and_its_classifier_trains_a_head_alone():
    model = _model("scatter_linear", projection=False, embedding_dim=15_552, classes=("a", "b"))
    trained = trainable_variables(build_backbone(model, 0), "all")
    assert [v.path for v in trained] == ["logits/kernel", "logits/bias"]
    assert not any(v.numpy().any() for v in trained)  # from zero


def test_features_ignore_the_contrast_of_an_image():
    """Each group of paths is normalised by itself, and small groups are not flattened."""
    model = _model("scatter_linear", projection=False, embedding_dim=15_552)
    backbone = build_backbone(model, 0)
    image = np.random.default_rng(2).uniform(-1, 1, (1, 32, 32, 3)).astype(np.float32)
    groups = backbone(image).numpy().reshape(64, 27, 9)
    np.testing.assert_allclose(groups.mean((0, 2)), 0.0, atol=1e-3)
    np.testing.assert_allclose(groups.std((0, 2)), 1.0, atol=1e-3)
    np.testing.assert_allclose(backbone(0.5 * image), backbone(image), atol=1e-2)


def test_scattering_net_comes_back_from_its_file(tmp_path):
    model = _model("scatter_linear")
    backbone = build_backbone(model, 5)
    save_backbone(backbone, tmp_path / "backbone.keras")
    again = load_backbone(tmp_path / "backbone.keras", model)
    pixels = np.random.default_rng(3).integers(0, 256, (2, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(again(preprocess(pixels)), backbone(preprocess(pixels)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"image_size": 30}, "is not a multiple of 4"), ({"norm_groups": 10}, "does not divide")],
)
def test_what_cannot_be_scattered_is_refused(options, sentence):
    model = _model("scatter_linear").model_copy(update=options)
    with pytest.raises(ConfigError, match=sentence):
        build_backbone(model, 0)


def test_mirrored_features_do_not_tell_an_image_from_its_mirror_image():
    images = np.random.default_rng(4).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    layer = scattering_layer()(mirrored=True)
    found, other = layer(images).numpy(), layer(images[:, :, ::-1]).numpy()
    assert found.shape == (2, 8, 4, 243)
    assert np.linalg.norm(found - other) < 0.01 * np.linalg.norm(found)
    upside = layer(images[:, ::-1]).numpy()
    assert np.linalg.norm(found - upside) > 0.1 * np.linalg.norm(found)
