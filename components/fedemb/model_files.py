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

from components.fedemb.errors import ArtifactError

_MEMBERS = {"config.json", "metadata.json", "model.weights.h5"}


def stored_tensors(path: Path) -> list[dict[str, Any]]:
    """Lists every tensor of a `.keras` file.

    Returns:
      `{"name": path inside the weights file, "shape": [..]}`, sorted by name.

    Raises:
      ArtifactError: not such a file, other members inside, or an optimizer or compiled state.
    """
    import h5py

    try:
        with zipfile.ZipFile(path) as archive:
            members = set(archive.namelist())
            if members != _MEMBERS:
                raise ArtifactError(
                    f"{path.name} holds {sorted(members ^ _MEMBERS)} beside or instead of a "
                    "backbone; save the backbone alone"
                )
            config = json.loads(archive.read("config.json"))
            weights = archive.read("model.weights.h5")
        tensors: list[dict[str, Any]] = []

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                tensors.append({"name": name, "shape": list(item.shape)})

        with h5py.File(io.BytesIO(weights), "r") as file:
            file.visititems(visit)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path.name} is not a readable .keras file; run the step that writes it again"
        ) from error
    if config.get("compile_config"):
        raise ArtifactError(
            f"{path.name} holds compile settings, so it is not a bare backbone; save it uncompiled"
        )
    return sorted(tensors, key=lambda tensor: tensor["name"])


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
