"""Checkpoints: the server state after a round, written atomically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, cast

from fedemb.engine.packed_state import pack, unpack
from fedemb.engine.server import STATE_ARRAYS, ServerState
from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.privacy.queries import MechanismState
from fedemb.storage import Store

SCHEMA = "fedemb/checkpoint/1"
_NAME = "checkpoint.npz"


@dataclass(frozen=True)
class Progress:
    """The state of a run after a committed round. Noised."""

    state: ServerState
    mechanism: MechanismState | None
    """`Mechanism.state_to_json()`; None before the first round."""


class _Head(TypedDict):
    """State of a checkpoint without its arrays."""

    schema: str
    inputs_sha: str
    rounds: int
    mechanism: MechanismState | None


def save(store: Store, inputs_sha: str, progress: Progress) -> None:
    """Replaces the checkpoint of an attempt.

    Args:
      store: working state of the attempt.
      inputs_sha: digest of all inputs.
      progress: state after the last committed round.
    """
    state = progress.state
    head: _Head = {
        "schema": SCHEMA,
        "inputs_sha": inputs_sha,
        "rounds": state.rounds,
        "mechanism": progress.mechanism,
    }
    store.write(_NAME, pack(head, state.arrays))


def load(store: Store, inputs_sha: str) -> Progress | None:
    """Reads the checkpoint; returns None if no checkpoint exists.

    Raises:
      PlanMismatch: the checkpoint belongs to other inputs.
      ArtifactError: the checkpoint is damaged, or has another schema version.
    """
    try:
        data = store.read(_NAME)
    except FileNotFoundError:
        return None
    try:
        packed, arrays = unpack(data, *STATE_ARRAYS)
    except ValueError as error:
        raise ArtifactError(
            "the checkpoint cannot be read; restore the working state of the run from a backup, or "
            "start a run with a new id"
        ) from error
    head = cast("_Head", packed)
    if head.get("schema") != SCHEMA:
        raise ArtifactError(
            f"the checkpoint has schema {head.get('schema')!r}, expected {SCHEMA!r}; resume with "
            "the version that wrote it"
        )
    if head["inputs_sha"] != inputs_sha:
        raise PlanMismatch(
            "the checkpoint was made from other inputs: data, code, weights or configuration "
            "changed since; start a run with a new id"
        )
    state = ServerState(**arrays, rounds=head["rounds"])
    return Progress(state, head["mechanism"])
