"""What is inside a saved Keras model, read without TensorFlow: names and shapes of all tensors.

A `.keras` file is a zip of `config.json`, `metadata.json` and `model.weights.h5`. Whatever else it
holds, and every tensor beyond the backbone's, must not leave the private side: a head knows its
virtual client, optimizer slots know the last updates.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

from fedemb.errors import ArtifactError

_MEMBERS = {"config.json", "metadata.json", "model.weights.h5"}
_LIST = 64
"""Numbers in one list of a layer's settings: shapes, strides, axes; more would be a tensor."""
_TEXT = 1024
"""Characters in one setting; more would be code or data."""


def stored_tensors(path: Path) -> list[dict[str, Any]]:
    """Lists every tensor of a `.keras` file.

    Returns:
      `{"name": path inside the weights file, "shape": [..]}`, sorted by name.

    Raises:
      ArtifactError: not such a file, other members inside, an optimizer or compiled state, or
        layers that carry code or numbers in their settings.
    """
    return [{"name": name, "shape": list(value.shape)} for name, value in _read(path)]


def stored_values(path: Path) -> list[Any]:
    """The tensors of a `.keras` file as arrays, in the order of `stored_tensors`.

    Raises:
      ArtifactError: as `stored_tensors`.
    """
    return [value for _, value in _read(path)]


def _read(path: Path) -> list[tuple[str, Any]]:
    import h5py
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            if sorted(members) != sorted(_MEMBERS):
                odd = sorted(set(members) ^ _MEMBERS) or ["a member twice"]
                raise ArtifactError(
                    f"{path.name} holds {odd} beside or instead of a backbone; save the backbone "
                    "alone"
                )
            config = json.loads(archive.read("config.json"))
            weights = archive.read("model.weights.h5")
        tensors: list[tuple[str, Any]] = []

        def visit(name: str, item: Any) -> None:
            if any(value.size > _LIST for value in map(np.asarray, item.attrs.values())):
                raise ArtifactError(f"{path.name} holds numbers beside its tensors; save it anew")
            if isinstance(item, h5py.Dataset):
                tensors.append((name, item[()]))

        with h5py.File(io.BytesIO(weights), "r") as file:
            visit("/", file)
            file.visititems(visit)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path.name} is not a readable .keras file; run the step that writes it again"
        ) from error
    if config.get("compile_config"):
        raise ArtifactError(
            f"{path.name} holds compile settings, so it is not a bare backbone; save it uncompiled"
        )
    problem = _setting_problem(config)
    if problem is not None:
        raise ArtifactError(f"{path.name} {problem}; keep weights in tensors and code in modules")
    return sorted(tensors, key=lambda tensor: tensor[0])


def _setting_problem(value: Any) -> str | None:
    """Whether the settings of the layers hold what only tensors or code may hold."""
    if isinstance(value, str):
        return f"holds a text of {len(value)} characters" if len(value) > _TEXT else None
    if isinstance(value, dict):
        if value.get("class_name") in ("Lambda", "__lambda__"):
            return "holds a Lambda layer, which is code"
        items = list(value.values())
    elif isinstance(value, list):
        items = value
        numbers = _numbers(value)
        if numbers > _LIST:
            return f"holds {numbers} numbers in the settings of a layer"
    else:
        return None
    return next(filter(None, map(_setting_problem, items)), None)


def _numbers(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_numbers, value))
    return isinstance(value, int | float)


def tensor_problem(stored: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str | None:
    """Compares what a file holds with the backbone's own tensors.

    The weights file has its own names, so shapes are compared, each as often as it occurs; words
    that no backbone tensor may carry are searched in the names.

    Args:
      stored: result of `stored_tensors`.
      expected: `{"name", "shape"}` of the backbone's variables.

    Returns:
      What is wrong, or None.
    """
    for tensor in stored:
        words = tensor["name"].lower().split("/")
        if words[0] not in ("layers", "_layer_checkpoint_dependencies", "vars") or any(
            word.startswith(("optimizer", "head", "seed_generator", "momentum", "velocity"))
            for word in words
        ):
            return f"the tensor {tensor['name']!r} is not of a backbone"
    found = sorted(json.dumps(tensor["shape"]) for tensor in stored)
    wanted = sorted(json.dumps(list(tensor["shape"])) for tensor in expected)
    if found != wanted:
        return (
            f"it holds {len(found)} tensors, the backbone has {len(wanted)}, or their shapes differ"
        )
    return None
