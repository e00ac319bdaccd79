"""Checkpoints: the server state after a round, written atomically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, cast

from fedemb.engine.packed_state import pack, unpack
from fedemb.engine.server import STATE_ARRAYS, ServerState
from fedemb.errors import ArtifactError
from fedemb.privacy.queries import MechanismState
from fedemb.storage import Store

_NAME = "checkpoint.npz"


@dataclass(frozen=True)
class Progress:
    """The state of a run after a committed round. Noised."""

    state: ServerState
    mechanism: MechanismState | None
    """`Mechanism.state_to_json()`; None before the first round."""


class _Head(TypedDict):
    """State of a checkpoint without its arrays."""

    rounds: int
    mechanism: MechanismState | None


def save(store: Store, progress: Progress) -> None:
    """Replaces the checkpoint in a working state, whose signatures bind it to all inputs."""
    state = progress.state
    head: _Head = {"rounds": state.rounds, "mechanism": progress.mechanism}
    store.write(_NAME, pack(head, state.arrays))


def load(store: Store) -> Progress | None:
    """Reads the checkpoint; returns None if no checkpoint exists.

    Raises:
      ArtifactError: the checkpoint is damaged.
    """
    try:
        packed, arrays = unpack(store.read(_NAME), *STATE_ARRAYS)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ArtifactError(
            "the checkpoint cannot be read; restore the working state of the run from a backup, or "
            "start a run with a new id"
        ) from error
    head = cast("_Head", packed)
    return Progress(ServerState(**arrays, rounds=head["rounds"]), head["mechanism"])
