"""Whether somebody's `.keras` file may be a backbone: told from its description alone.

So a run can be refused before anything is charged, and nothing of the file is executed.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from fedemb.errors import ArtifactError, InputError

ALLOWED_LAYERS = frozenset(
    {
        "Activation",
        "Add",
        "AveragePooling2D",
        "Concatenate",
        "Conv2D",
        "Dense",
        "DepthwiseConv2D",
        "Flatten",
        "Functional",
        "GainConv2D",
        "GlobalAveragePooling2D",
        "GlobalMaxPooling2D",
        "GroupNormalization",
        "Identity",
        "InputLayer",
        "LayerNormalization",
        "LeakyReLU",
        "MaxPooling2D",
        "Multiply",
        "PReLU",
        "ReLU",
        "Rescaling",
        "Reshape",
        "SeparableConv2D",
        "Scattering",
        "Sequential",
        "Softmax",
        "StandardizedConv2D",
        "UnitNormalization",
        "Whitened",
        "ZeroPadding2D",
        "fedemb>GainConv2D",
        "fedemb>Scattering",
        "fedemb>StandardizedConv2D",
        "fedemb>Whitened",
    }
)
"""Layers an imported backbone may have: no code of its own, no state, no mixing of images."""


def check_import(path: Path) -> None:
    """Refuses a file that is missing or damaged, or has layers that are not allowed.

    Raises:
      InputError: there is no such file.
      ArtifactError: it is no `.keras` file, or has other layers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
    except FileNotFoundError as error:
        raise InputError(
            f"pretraining.import_path={path} does not exist; name a .keras file"
        ) from error
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path.name} is not a .keras file; save the backbone with Keras 3"
        ) from error
    found = sorted(_layer_classes(config) - ALLOWED_LAYERS)
    if found:
        raise ArtifactError(
            f"{path.name} has layers that are not allowed here ({', '.join(found)}); build the "
            f"backbone of {', '.join(sorted(ALLOWED_LAYERS))}"
        )


def _layer_classes(config: Any) -> set[str]:
    """Class names of a model's configuration and of all layers inside, however deep."""
    names = {str(config.get("class_name"))}
    if config.get("registered_name") not in (None, config.get("class_name")):
        names.add(str(config["registered_name"]))
    inner = config.get("config")
    for layer in inner.get("layers", []) if isinstance(inner, dict) else []:
        names |= _layer_classes(layer)
    return names
