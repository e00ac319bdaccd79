"""What is inside a saved Keras model, read without TensorFlow: names and shapes of all tensors.

A `.keras` file is a zip of `config.json`, `metadata.json` and `model.weights.h5`. Whatever else it
holds, and every tensor beyond the backbone's, must not leave the private side: a head knows its
virtual client, optimizer slots know the last updates.

A file may say it is far larger than it is (a zip that unfolds, a tensor without its numbers), so it
is looked into by another process, which has `MEMORY` and `SECONDS` and no more, and never unfolds.
"""

from __future__ import annotations

import functools
import io
import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedemb.documents.fields import Tensor
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import strict_json

MEMORY = 4 << 30
"""Bytes of address space for the look inside; the weights themselves are never read."""
SECONDS = 60
"""Of processor time."""
_REFUSED = 3
"""Exit code for a file that is not a backbone; a process that was cut off has any other."""
_FINITE = "--finite"
"""Asks `main` for a tensor that is not finite."""
_PLAIN_LAYOUTS = (0, 1)
"""Of HDF5: compact and contiguous, not chunked and not virtual."""
_MEMBERS = {"config.json", "metadata.json", "model.weights.h5"}
_STANDARDISING = (b'"fedemb>StandardizedConv2D"', b'"fedemb>GainConv2D"')
"""Layers that are stored with other kernels than they compute with; a model holds the latter."""
_LIST = 64
"""Numbers in one list of a layer's settings: shapes, strides, axes; more would be a tensor."""
_TEXT = 1024
"""Characters in one setting; more would be code or data."""


@dataclass(frozen=True)
class _File:
    """A file, told from others by its bytes alone."""

    sha: str
    path: Path = field(compare=False)


def stored_tensors(path: Path, sha: str) -> tuple[Tensor, ...]:
    """Lists every tensor of a `.keras` file, in a process of limited memory and time.

    Args:
      path: the file.
      sha: digest of its bytes, under which the answer is remembered.

    Returns:
      Their paths inside the weights file and their shapes, sorted by name.

    Raises:
      ArtifactError: not such a file, other members inside, an optimizer or compiled state, layers
        that carry code or numbers in their settings, or a file that takes too much to look into.
    """
    return tuple(Tensor.model_validate(tensor) for tensor in _looked_into(_File(sha, path)))


def computes_otherwise(start: Path) -> bool:
    """Whether a start's convolutions standardise their weights, which the model then holds.

    Raises:
      ArtifactError: not a `.keras` file.
    """
    try:
        with zipfile.ZipFile(start) as archive:
            config = _member(archive, start, "config.json")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{start.name} is not a readable .keras file; run the step that writes it again"
        ) from error
    return any(kind in config for kind in _STANDARDISING)


def stored_move(
    start: Path, released: Path, share: float, shas: tuple[str, str]
) -> tuple[float, int]:
    """How far a model lies from a share of its start, by the tensors that changed.

    Args:
      start: `.keras` file of the start.
      released: `.keras` file of the model.
      share: that the start is multiplied with.
      shas: digests of both files, under which the answer is remembered.

    Returns:
      The distance, and how many numbers those tensors hold.

    Raises:
      ArtifactError: the files hold other tensors than each other, or as `stored_tensors`.
    """
    found = _looked_into(_File(shas[1], released), _File(shas[0], start), share)
    return float(found[0]), int(found[1])


def first_not_finite(path: Path, sha: str) -> str | None:
    """Names a tensor of a `.keras` file that holds NaN or infinity; None: all weights are finite.

    Args:
      path: the file.
      sha: digest of its bytes, under which the answer is remembered.

    Raises:
      ArtifactError: as `stored_tensors`.
    """
    return _looked_into(_File(sha, path), finite=True)


@functools.lru_cache(maxsize=64)
def _looked_into(
    file: _File, start: _File | None = None, share: float = 1.0, finite: bool = False
) -> Any:
    """What `main` prints of a file, in a process of limited memory and time."""
    path, further = file.path, [] if start is None else [str(start.path.absolute()), repr(share)]
    further += [_FINITE] if finite else []
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), *further]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            command, capture_output=True, timeout=4 * SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        child = None
    if child is None or child.returncode not in (0, _REFUSED):
        raise ArtifactError(
            f"{path.name} takes more than {MEMORY >> 30} GB or {SECONDS} s to look into, so it is "
            "no backbone; run the step that writes it again"
        )
    if child.returncode == _REFUSED:
        raise ArtifactError(child.stdout.decode(errors="replace"))
    return strict_json(child.stdout, path.name)


def main(path: Path, start: str = "", share: str = "1") -> int:
    """Prints the tensors of a file as JSON, how far it moved, or the first tensor not finite.

    The exit code says whether it is the answer or what is wrong with the file.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        if start == _FINITE:
            found = _not_finite(path)
        else:
            found = _moved(Path(start), path, float(share)) if start else _tensors(path)
        sys.stdout.write(json.dumps(found))
    except ArtifactError as error:
        sys.stdout.write(str(error))
        return _REFUSED
    return 0


def _tensors(path: Path) -> list[dict[str, Any]]:
    import h5py

    try:
        with zipfile.ZipFile(path) as archive:
            config = strict_json(_member(archive, path, "config.json"), path.name)
            weights = _member(archive, path, "model.weights.h5")
        tensors: list[dict[str, Any]] = []

        def visit(name: str, item: Any) -> None:
            for attribute in item.attrs:
                extent = item.attrs.get_id(attribute).get_space().get_simple_extent_npoints()
                value = item.attrs[attribute] if extent <= _LIST else None
                if value is None or (isinstance(value, str | bytes) and len(value) > _TEXT):
                    raise ArtifactError(f"{path.name} holds numbers beside its tensors")
            if isinstance(item, h5py.Dataset):
                _require_plain(item, path)
                tensors.append({"name": name, "shape": list(item.shape)})

        with h5py.File(io.BytesIO(weights), "r") as file:
            visit("/", file)
            file.visititems(visit)
    except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{path.name} is not a readable .keras file; run the step that writes it again"
        ) from error
    if not isinstance(config, dict) or config.get("compile_config"):
        raise ArtifactError(
            f"{path.name} holds compile settings, so it is not a bare backbone; save it uncompiled"
        )
    problem = _setting_problem(config)
    if problem is not None:
        raise ArtifactError(f"{path.name} {problem}; keep weights in tensors and code in modules")
    return sorted(tensors, key=lambda tensor: tensor["name"])


def _moved(start: Path, released: Path, share: float) -> tuple[float, int]:
    import h5py
    import numpy as np

    names = {tensor["name"]: tensor["shape"] for tensor in _tensors(start)}
    if names != {tensor["name"]: tensor["shape"] for tensor in _tensors(released)}:
        raise ArtifactError(
            f"{released.name} holds other tensors than the public start, so nobody knows how far it"
            " moved; run the training again"
        )
    with zipfile.ZipFile(start) as first, zipfile.ZipFile(released) as last:
        packed = [archive.read("model.weights.h5") for archive in (first, last)]
    square, changed = 0.0, 0
    with h5py.File(io.BytesIO(packed[0])) as before, h5py.File(io.BytesIO(packed[1])) as after:
        for name in names:
            old, new = (np.asarray(file[name], np.float64) for file in (before, after))
            if np.any(old != new):
                square += float(np.sum(np.square(new - share * old)))
                changed += new.size
    return float(np.sqrt(square)), changed


def _not_finite(path: Path) -> str | None:
    import h5py
    import numpy as np

    names = [tensor["name"] for tensor in _tensors(path)]
    with zipfile.ZipFile(path) as archive:
        packed = archive.read("model.weights.h5")
    with h5py.File(io.BytesIO(packed)) as weights:
        for name in names:
            if not np.isfinite(np.asarray(weights[name], np.float64)).all():
                return name
    return None


def _member(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    """A member as it lies in the file: Keras packs nothing, and what is packed could unfold."""
    names = archive.namelist()
    if sorted(names) != sorted(_MEMBERS):
        odd = sorted(set(names) ^ _MEMBERS) or ["a member twice"]
        raise ArtifactError(
            f"{path.name} holds {odd} beside or instead of a backbone; save the backbone alone"
        )
    member = archive.getinfo(name)
    packed = member.compress_type != zipfile.ZIP_STORED
    if packed or not member.file_size == member.compress_size <= path.stat().st_size:
        raise ArtifactError(
            f"{path.name} holds a packed {name}, and Keras packs nothing; save the backbone with "
            "Keras 3"
        )
    return archive.read(name)


def _require_plain(item: Any, path: Path) -> None:
    """A tensor's numbers lie in the file, all of them, as they are."""
    layout = item.id.get_create_plist().get_layout()
    plain = layout in _PLAIN_LAYOUTS and not item.external
    if not plain or item.id.get_storage_size() != item.size * item.dtype.itemsize:
        raise ArtifactError(
            f"{path.name} holds a tensor that is packed, elsewhere or not there; save the backbone "
            "with Keras 3"
        )


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


def tensor_problem(stored: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Compares what a file holds with the backbone's own tensors.

    The weights file has its own names, so shapes are compared, each as often as it occurs; words
    that no backbone tensor may carry are searched in the names.

    Args:
      stored: result of `stored_tensors`.
      expected: the backbone's variables.

    Returns:
      What is wrong, or None.
    """
    for tensor in stored:
        words = tensor.name.lower().split("/")
        if words[0] not in ("layers", "_layer_checkpoint_dependencies", "vars") or any(
            word.startswith(("optimizer", "head", "seed_generator", "momentum", "velocity"))
            for word in words
        ):
            return f"the tensor {tensor.name!r} is not of a backbone"
    found = sorted(tensor.shape for tensor in stored)
    wanted = sorted(tensor.shape for tensor in expected)
    if found != wanted:
        return (
            f"it holds {len(found)} tensors, the backbone has {len(wanted)}, or their shapes differ"
        )
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
