"""Model card of the trainer, card of the public backbone, and public lines of the rounds."""

# h5py ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

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
from typing import Any, ClassVar, TypedDict

from fedemb.documents.audit import MechanismAudit
from fedemb.documents.fields import AnyJson, Count, Name, Sha, Tensor
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import Json, strict_json
from fedemb.foundation.document import Document, Part
from fedemb.foundation.files import open_regular


class Pretrained(Document):
    """`pretrained.json`, written by pretrain_public beside `backbone.keras`."""

    kind: ClassVar[str] = "pretrained"
    role: ClassVar[str | None] = "pretrain"

    pretraining_kind: Name
    weights_sha: Sha
    """SHA-256 of `backbone.keras`."""
    model: AnyJson
    """`ModelConfig`."""
    images: Count
    classes: Count
    final_loss: float | None
    seed: int
    constant_images: Count
    """Public or drawn images that the constants of features were computed from."""
    head_images: Count
    """Public images that the head was trained on; 0: it starts untrained."""


class ModelCard(Document):
    """`model.json`, written by train_model beside `backbone.keras`."""

    kind: ClassVar[str] = "model"
    role: ClassVar[str | None] = "trainer"

    run_id: Name
    attempt: Count
    config_sha: Sha
    plan_sha: Sha
    code_sha: Sha
    inputs_sha: Sha
    initial_weights_sha: Sha
    weights_sha: Sha
    key_injected: bool
    """Whether coins and noise may come from a key passed by the caller."""
    rounds_run: Count
    backbone: Name
    embedding_dim: Count
    tensors: list[Tensor]
    mechanism_audit: MechanismAudit | None
    """Audit of the mechanism; None: the run has no noise, or the trainer has not audited it yet."""


class RoundLine(Part):
    """Public line of a round in `rounds.jsonl`."""

    round: Count
    clients_planned: float
    """Public constant by which the sum was divided."""
    output_sha: Sha
    """Digest of the noised output."""
    event: AnyJson | None
    """Privacy event; None: the mechanism tracks participation and is priced as a whole."""


class RoundHead(Part):
    """Head of a round's record in the trainer's working state: one line of canonical JSON."""

    public: RoundLine
    mechanism_state: AnyJson
    """`Mechanism.round_state()` after the round."""
    tags_sha: Sha | None
    """`TagChain.sha` after the round; None: rounds are independent."""
    mean_sha: Sha
    """SHA-256 of the bytes after the head: the noised mean, or no bytes."""


class Commitments(Part):
    """Keyed commitments to the output of partition_users."""

    users: Sha
    evaluation: Sha


class UsersManifest(Document):
    """Written by partition_users."""

    kind: ClassVar[str] = "users"
    role: ClassVar[str | None] = "partition"

    run_id: Name
    config_sha: Sha
    reservation_sha: Sha
    """SHA-256 of the reservation document."""
    virtual_clients: Count
    groupings: Count
    blocks: list[Name]
    image_size: Count
    channels: Count
    commitments: Commitments


MEMORY = 4 << 30
"""Maximum bytes of address space for the inspection."""
SECONDS = 60
"""Maximum seconds of processor time for the inspection."""
_REFUSED = 3
"""Exit code for a file that is not a backbone; a killed process has another code."""
_PLAIN_LAYOUTS = (0, 1)
"""Accepted HDF5 layouts: compact and contiguous, not chunked or virtual."""
_MEMBERS = {"config.json", "metadata.json", "model.weights.h5"}
_LIST = 64
"""Maximum numbers in a list of layer settings (shapes, strides, axes); more would be a tensor."""
_TEXT = 1024
"""Maximum characters in one setting; more would be code or data."""


@dataclass(frozen=True)
class _File:
    """File that is identified only by its bytes."""

    sha: str
    path: Path = field(compare=False)


def stored_tensors(path: Path, sha: str) -> tuple[Tensor, ...]:
    """Lists every tensor of a `.keras` file, in a process of limited memory and time.

    Args:
      path: the file.
      sha: digest of the file's bytes, used as the cache key.

    Returns:
      Tensor paths inside the weights file and their shapes, sorted by name.

    Raises:
      ArtifactError: the file is not a `.keras` file, has other members, an optimizer or compiled
        state, has layers with code or numbers in their settings, has NaN or infinite weights, or
        exceeds the resource limits.
    """
    return tuple(Tensor.model_validate(tensor) for tensor in _looked_into(_File(sha, path)))


@functools.lru_cache(maxsize=64)
def _looked_into(file: _File) -> Any:
    """Returns the output of `main` for a file, run in a process of limited memory and time."""
    path = file.path
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute())]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            command, capture_output=True, timeout=4 * SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        child = None
    if child is None or child.returncode not in (0, _REFUSED):
        raise ArtifactError(
            f"reading {path.name} takes more than {MEMORY >> 30} GB or {SECONDS} s, so it is not a "
            "backbone; run the step that writes it again"
        )
    if child.returncode == _REFUSED:
        raise ArtifactError(child.stdout.decode(errors="replace"))
    return strict_json(child.stdout, path.name)


def main(path: Path) -> int:
    """Prints the tensors of a file as JSON, or what is wrong with it; the exit code says which."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        sys.stdout.write(json.dumps(_tensors(path)))
    except ArtifactError as error:
        sys.stdout.write(str(error))
        return _REFUSED
    return 0


class _Stored(TypedDict):
    name: str
    shape: list[int]


def _tensors(path: Path) -> list[_Stored]:
    import h5py
    import numpy as np

    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            config = strict_json(_member(archive, path, "config.json"), path.name)
            weights = _member(archive, path, "model.weights.h5")
        tensors: list[_Stored] = []

        def visit(name: str, item: Any) -> None:
            for attribute in item.attrs:
                extent = item.attrs.get_id(attribute).get_space().get_simple_extent_npoints()
                value = item.attrs[attribute] if extent <= _LIST else None
                if value is None or (isinstance(value, str | bytes) and len(value) > _TEXT):
                    raise ArtifactError(
                        f"{path.name} has an attribute {attribute[:40]!r} that is not short text; "
                        "run the step that writes it again"
                    )
            if isinstance(item, h5py.Dataset):
                _require_plain(item, path)
                if not np.isfinite(np.asarray(item, np.float64)).all():
                    raise ArtifactError(
                        f"the tensor {name!r} of {path.name} has NaN or infinite weights; import "
                        "another backbone, or train with a lower learning rate"
                    )
                tensors.append({"name": name, "shape": [int(size) for size in item.shape]})

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


def _member(archive: zipfile.ZipFile, path: Path, name: str) -> bytes:
    """Returns a stored member; refuses compressed ones, which Keras never writes (zip bombs)."""
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
    """Refuses a tensor whose numbers are not all stored in the file, uncompressed."""
    layout = item.id.get_create_plist().get_layout()
    plain = layout in _PLAIN_LAYOUTS and not item.external
    if not plain or item.id.get_storage_size() != item.size * item.dtype.itemsize:
        raise ArtifactError(
            f"{path.name} holds a tensor that is packed, elsewhere or not there; save the backbone "
            "with Keras 3"
        )


def _setting_problem(value: Json) -> str | None:
    """Returns the problem if layer settings contain tensors or code, else None."""
    if isinstance(value, str):
        return f"holds a text of {len(value)} characters" if len(value) > _TEXT else None
    if isinstance(value, dict):
        if value.get("class_name") in ("Lambda", "__lambda__"):
            return "holds a Lambda layer, which is code"
        items = [*value.values()]
    elif isinstance(value, list):
        items = value
        numbers = _numbers(value)
        if numbers > _LIST:
            return f"holds {numbers} numbers in the settings of a layer"
    else:
        return None
    return next(filter(None, map(_setting_problem, items)), None)


def _numbers(value: Json) -> int:
    if isinstance(value, list):
        return sum(map(_numbers, value))
    return isinstance(value, int | float)


def tensor_problem(stored: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Compares the tensors of a file with those of the backbone; returns the problem, or None.

    The weights file uses other names, so shapes are compared, with their counts. Names are searched
    for words that no backbone tensor may contain.
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
    sys.exit(main(Path(sys.argv[1])))
