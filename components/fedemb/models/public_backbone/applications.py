"""Keras applications by name: built by Keras, with its weights or those of a local file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from fedemb.errors import ArtifactError, InputError, StorageError
from fedemb.foundation.canonical_json import sha256_hex
from fedemb.foundation.digests import file_digest
from fedemb.models.arrays import Model
from fedemb.models.public_backbone.built import Built
from fedemb.models.public_backbone.keras_network import of_network
from fedemb.models.public_backbone.named import Named
from fedemb.models.public_backbone.pixels import BY_KIND


@dataclass(frozen=True)
class Application(Named):
    """A network of `keras.applications`."""

    function: str
    """Name in `keras.applications`."""
    pixels: str
    """Pixel values that it takes, as `pretraining.import_pixels`."""

    @property
    @override
    def origin(self) -> str:
        return f"download by keras.applications.{self.function}"

    @property
    @override
    def ready(self) -> bool:
        return True

    @override
    def build(self, size: int, weights: Path | None) -> Built:
        import keras

        if weights is not None and not weights.is_file():
            raise InputError(f"{weights} is not a file. Name the weights of {self.name}")
        function: Callable[..., Model] = getattr(keras.applications, self.function)
        shape = {"include_top": False, "pooling": "avg", "input_shape": (size, size, 3)}
        network = function(weights=None, **shape) if weights else self._downloaded(function, shape)
        if weights is not None:
            # Keras leaves weights that a file lacks as they are; NaN is refused below.
            network.set_weights([np.full_like(one, np.nan) for one in network.get_weights()])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    network.load_weights(weights)
            except Exception as error:  # Keras raises many types for a wrong file
                raise ArtifactError(
                    f"{weights.name} does not hold the weights of {self.function} without its "
                    f"classifier ({type(error).__name__}). Use the file that Keras downloads"
                ) from error
        digest = file_digest(weights) if weights else _digest(network)
        source = weights.name if weights else f"keras.applications.{self.function}"
        return of_network(network, BY_KIND[self.pixels], source, digest)

    def _downloaded(self, function: Callable[..., Model], shape: Mapping[str, object]) -> Model:
        try:
            return function(weights="imagenet", **shape)
        except Exception as error:  # a network fault, or a digest that does not match
            raise StorageError(
                f"the weights of {self.name} cannot be downloaded ({type(error).__name__}). "
                "Connect to a network, or pass that file with --weights"
            ) from error


def _digest(network: Model) -> str:
    """Returns the SHA-256 of all weights in their order."""
    return sha256_hex(b"".join(np.asarray(one, np.float32).tobytes() for one in network.weights))


_TABLE = (
    ("ConvNeXtBase", 224, 32, 1024, 87566464, "0..255"),
    ("ConvNeXtLarge", 224, 32, 1536, 196230336, "0..255"),
    ("ConvNeXtSmall", 224, 32, 768, 49454688, "0..255"),
    ("ConvNeXtTiny", 224, 32, 768, 27820128, "0..255"),
    ("ConvNeXtXLarge", 224, 32, 2048, 348147968, "0..255"),
    ("DenseNet121", 224, 32, 1024, 7037504, "imagenet"),
    ("DenseNet169", 224, 32, 1664, 12642880, "imagenet"),
    ("DenseNet201", 224, 32, 1920, 18321984, "imagenet"),
    ("EfficientNetB0", 224, 32, 1280, 4049571, "0..255"),
    ("EfficientNetB1", 240, 32, 1280, 6575239, "0..255"),
    ("EfficientNetB2", 260, 32, 1408, 7768569, "0..255"),
    ("EfficientNetB3", 300, 32, 1536, 10783535, "0..255"),
    ("EfficientNetB4", 380, 32, 1792, 17673823, "0..255"),
    ("EfficientNetB5", 456, 32, 2048, 28513527, "0..255"),
    ("EfficientNetB6", 528, 32, 2304, 40960143, "0..255"),
    ("EfficientNetB7", 600, 32, 2560, 64097687, "0..255"),
    ("EfficientNetV2B0", 224, 32, 1280, 5919312, "0..255"),
    ("EfficientNetV2B1", 240, 32, 1280, 6931124, "0..255"),
    ("EfficientNetV2B2", 260, 32, 1408, 8769374, "0..255"),
    ("EfficientNetV2B3", 300, 32, 1536, 12930622, "0..255"),
    ("EfficientNetV2L", 480, 32, 1280, 117746848, "0..255"),
    ("EfficientNetV2M", 480, 32, 1280, 53150388, "0..255"),
    ("EfficientNetV2S", 384, 32, 1280, 20331360, "0..255"),
    ("InceptionResNetV2", 299, 75, 1536, 54336736, "-1..1"),
    ("InceptionV3", 299, 75, 2048, 21802784, "-1..1"),
    ("MobileNet", 224, 32, 1024, 3228864, "-1..1"),
    ("MobileNetV2", 224, 32, 1280, 2257984, "-1..1"),
    ("MobileNetV3Large", 224, 32, 960, 2996352, "0..255"),
    ("MobileNetV3Small", 224, 32, 576, 939120, "0..255"),
    ("NASNetLarge", 331, 32, 4032, 84916818, "-1..1"),
    ("NASNetMobile", 224, 32, 1056, 4269716, "-1..1"),
    ("ResNet101", 224, 32, 2048, 42658176, "caffe"),
    ("ResNet101V2", 224, 32, 2048, 42626560, "-1..1"),
    ("ResNet152", 224, 32, 2048, 58370944, "caffe"),
    ("ResNet152V2", 224, 32, 2048, 58331648, "-1..1"),
    ("ResNet50", 224, 32, 2048, 23587712, "caffe"),
    ("ResNet50V2", 224, 32, 2048, 23564800, "-1..1"),
    ("VGG16", 224, 32, 512, 14714688, "caffe"),
    ("VGG19", 224, 32, 512, 20024384, "caffe"),
    ("Xception", 299, 71, 2048, 20861480, "-1..1"),
)
"""Name in Keras, size of the training, smallest size, features, weights, pixel values."""


def applications() -> tuple[Application, ...]:
    """Returns all networks of `keras.applications`."""
    return tuple(
        Application(
            name=f"keras-{function.lower()}",
            architecture=f"{function} of keras.applications, batch normalisation folded",
            size=size,
            least=least,
            features=features,
            parameters=parameters,
            licence="unknown",
            provenance=f"{function} weights of Keras, trained on ImageNet-1k; see "
            "https://keras.io/api/applications for their licence",
            function=function,
            pixels=pixels,
        )
        for function, size, least, features, parameters, pixels in _TABLE
    )
