"""The working state of an attempt: signed objects, round records and checkpoints."""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict, cast

import numpy as np
from pydantic import ValidationError

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.evidence import write_rounds
from fedemb.documents.model import RoundHead, RoundLine, UsersManifest
from fedemb.documents.plan import read_plan
from fedemb.errors import ArtifactError, PlanMismatch, SignatureInvalid
from fedemb.foundation.canonical_json import (
    JsonObject,
    canonical_json,
    json_digest,
    sha256_hex,
    strict_json,
)
from fedemb.keys.trust import Signer, TrustStore
from fedemb.ledger import Reservation
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.running import Mechanism, MechanismState, RoundOutput, RoundState
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.signed_inputs import read_public_backbone, read_reserved, read_users
from fedemb.runtime.step_context import StepContext
from fedemb.storage import LARGEST, Store
from fedemb.storage.fencing import FencedStore, FencingToken
from fedemb.training.audit import RoundRecord
from fedemb.training.server import STATE_ARRAYS, ServerState, pack, unpack


@dataclass(frozen=True, kw_only=True)
class AttemptInputs:
    """The inputs of an attempt; created by `read`."""

    config: RunConfig
    run_id: str
    plan: MechanismPlan
    reservation: Reservation
    users: UsersManifest
    initial_weights_sha: str
    """Digest of the public backbone."""

    @classmethod
    def read(cls, context: StepContext) -> AttemptInputs:
        """Reads plan, reservation, users and public backbone of a step, and verifies them.

        Raises:
          PlanMismatch: plan, reservation, users or code do not match.
          SignatureInvalid: an input is not signed by the step that writes it.
        """
        plan, document = read_plan(context.artifacts.privacy_plan, context.config)
        reservation = Reservation.of(read_reserved(context))
        context.writable_ledger.chain.trust.check(document, at=reservation.sequence)
        inputs = cls(
            config=context.config,
            run_id=context.run_id,
            plan=plan,
            reservation=reservation,
            users=read_users(context),
            initial_weights_sha=read_public_backbone(context).weights_sha,
        )
        inputs._check()
        return inputs

    @property
    def number(self) -> int:
        """Number of the attempt."""
        return self.reservation.attempt

    @cached_property
    def inputs_sha(self) -> str:
        """Digest of all inputs; other inputs draw other coins and noise."""
        return json_digest(
            {
                "plan_sha": self.plan.digest,
                "config_sha": self.reservation.config_sha,
                "initial_weights_sha": self.initial_weights_sha,
                "data_commitment": self.users.commitments.users,
                "code_sha": self.reservation.code_sha,
            }
        )

    def _check(self) -> None:
        reservation, users, config_sha = self.reservation, self.users, config_digest(self.config)
        expected = {
            "reservation.run_id": (reservation.run_id, self.run_id),
            "reservation.plan_sha": (reservation.plan_sha, self.plan.digest),
            "reservation.config_sha": (reservation.config_sha, config_sha),
            "reservation.code_sha": (reservation.code_sha, code_digest(self.config)),
            "users.run_id": (users.run_id, self.run_id),
            "users.config_sha": (users.config_sha, config_sha),
            "users.blocks": (sorted(users.blocks), sorted(reservation.blocks)),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise PlanMismatch(
                    f"{name} is {found}, expected {wanted}: the run differs from what was planned "
                    "and reserved. Start a run with a new id."
                )


# The working state of an attempt, signed by the trainer and verified before it is parsed.
#
# Checkpoint, round records and evidence stay in the private root between two starts of a trainer.
# Without signatures, anyone with write access could choose weights that the trainer then signs,
# or have a round drawn twice from different sums.


_SCHEMA = "fedemb/working_state/1"
_LONGEST = 1000
"""Maximum bytes of a signature line."""


class SignedState(FencedStore):
    """Objects with a first line that signs attempt, inputs, name and content.

    Args:
      store: working state of the attempt.
      token: fencing token; after it is superseded, no object is changed.
      inputs: inputs of the attempt; state of others is rejected. Keys retired since its
          reservation are accepted.
      signer: signer of the trainer.
      trust: trusted keys of the ledger.
    """

    def __init__(
        self,
        store: Store,
        token: FencingToken,
        inputs: AttemptInputs,
        signer: Signer,
        trust: TrustStore,
    ) -> None:
        super().__init__(store, token)
        self._inputs, self._signer, self._trust = inputs, signer, trust

    def read(self, name: str, limit: int = LARGEST) -> bytes:
        """Reads and verifies an object.

        Raises:
          SignatureInvalid: the trainer did not sign it under this name in this attempt.
        """
        line, _, data = super().read(name, limit).partition(b"\n")
        try:
            signature = strict_json(line[:_LONGEST], f"the signature of {name}")
        except ArtifactError as error:
            raise SignatureInvalid(
                f"{name} of the working state is not signed by the trainer; restore the working "
                "state from a backup, or start a run with a new id"
            ) from error
        self._trust.verify(
            self._signed(name, data),
            signature,
            self._signer.role,
            f"{name} of the working state",
            at=self._inputs.reservation.sequence,
        )
        return data

    def write(self, name: str, data: bytes) -> None:
        """Signs and writes an object if the fencing token is current."""
        super().write(name, self._with_signature(name, data))

    def create(self, name: str, data: bytes) -> None:
        """Signs and creates an object if the fencing token is current."""
        super().create(name, self._with_signature(name, data))

    def _with_signature(self, name: str, data: bytes) -> bytes:
        return canonical_json(self._signer.sign(self._signed(name, data))) + b"\n" + data

    def _signed(self, name: str, data: bytes) -> JsonObject:
        return {
            "schema": _SCHEMA,
            "name": name,
            "sha": sha256_hex(data),
            "run_id": self._inputs.run_id,
            "attempt": self._inputs.number,
            "inputs_sha": self._inputs.inputs_sha,
        }


# The log of committed rounds: a round with a record is never computed again.
#
# A record holds the public line of the round, the mechanism's state after it, and the noised
# mean, so that a trainer killed right after can resume. Correlated noise also depends on the tags
# of earlier rounds: a record holds its own tag and a digest of all tags, so records have one
# size. Once a checkpoint covers the round, the mean is removed; the record's name stays reserved
# permanently.


_END = b"\n\0"
"""Separator between the header of a record and the bytes of the mean; invalid in JSON text."""


class RoundLog:
    """The records of one attempt, in its working state, whose signatures bind them to all inputs.

    Args:
      store: working state of the attempt.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def commit(self, index: int, mechanism: Mechanism, output: RoundOutput) -> RoundRecord:
        """Creates the record of a round, which commits the round.

        Args:
          index: number of the round.
          mechanism: `Mechanism` right after `aggregate`.
          output: the mechanism's `RoundOutput`.

        Raises:
          PlanMismatch: another trainer committed this round first.
        """
        priced_alone = not mechanism.plan.tracks_participation
        public = RoundLine(
            round=index,
            clients_planned=mechanism.plan.normalizer,
            output_sha=output.sums_sha,
            event=event_to_json(output.event) if priced_alone else None,
        )
        record = RoundRecord(public, mechanism.round_state(), mechanism.tags_sha, output.mean)
        try:
            self._store.create(_name(index), _encode(record))
        except FileExistsError as error:
            raise PlanMismatch(
                f"round {index} was committed by another trainer of this attempt; let only one run,"
                " then resume"
            ) from error
        return record

    def read(self, index: int) -> RoundRecord | None:
        """Returns the record of a round, or None if the round was never committed.

        Raises:
          ArtifactError: the record is damaged.
        """
        try:
            data = self._store.read(_name(index))
        except FileNotFoundError:
            return None
        head, _, payload = data.partition(_END)
        try:
            body = RoundHead.model_validate(strict_json(head, f"the head of round {index}"))
        except ValidationError as error:
            raise _damaged(index) from error
        mean = np.frombuffer(payload, np.float32).copy() if payload else None
        record = RoundRecord(
            body.public, cast("RoundState", body.mechanism_state), body.tags_sha, mean
        )
        if _encode(record) != data:
            raise _damaged(index)
        return record

    def cut(self, record: RoundRecord) -> None:
        """Removes the mean of a round that a checkpoint covers."""
        self._store.write(_name(record.index), _encode(replace(record, mean=None)))

    def lines(self, rounds: int) -> bytes:
        """Returns `rounds.jsonl`: the public line of each of the first `rounds` rounds.

        Raises:
          ArtifactError: a record is missing.
        """
        lines = []
        for index in range(rounds):
            record = self.read(index)
            if record is None:
                raise ArtifactError(
                    f"the record of round {index} is missing; restore the working state of the run"
                )
            lines.append(record.public)
        return write_rounds(lines)


def _encode(record: RoundRecord) -> bytes:
    payload = b"" if record.mean is None else record.mean.tobytes()
    head = RoundHead(
        public=record.public,
        mechanism_state=cast("JsonObject", record.mechanism_state),
        tags_sha=record.tags_sha,
        mean_sha=sha256_hex(payload),
    )
    return canonical_json(head.model_dump(mode="json")) + _END + payload


def _damaged(index: int) -> ArtifactError:
    return ArtifactError(
        f"the record of round {index} is damaged; restore the working state from a backup, or "
        "start a run with a new id"
    )


def _name(index: int) -> str:
    return f"rounds/{index:06d}.record"


# Checkpoints: the server state after a round, written atomically.


_CHECKPOINT = "checkpoint.npz"


@dataclass(frozen=True)
class Progress:
    """The state of a run after a committed round. Noised."""

    state: ServerState
    mechanism: MechanismState | None
    """`Mechanism.state_to_json()`; None before the first round."""


class _CheckpointHead(TypedDict):
    """State of a checkpoint without its arrays."""

    rounds: int
    mechanism: MechanismState | None


def save_checkpoint(store: Store, progress: Progress) -> None:
    """Replaces the checkpoint in a working state, whose signatures bind it to all inputs."""
    state = progress.state
    head: _CheckpointHead = {"rounds": state.rounds, "mechanism": progress.mechanism}
    store.write(_CHECKPOINT, pack(head, state.arrays))


def load_checkpoint(store: Store) -> Progress | None:
    """Reads the checkpoint; returns None if no checkpoint exists.

    Raises:
      ArtifactError: the checkpoint is damaged.
    """
    try:
        packed, arrays = unpack(store.read(_CHECKPOINT), *STATE_ARRAYS)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ArtifactError(
            "the checkpoint cannot be read; restore the working state of the run from a backup, or "
            "start a run with a new id"
        ) from error
    head = cast("_CheckpointHead", packed)
    return Progress(ServerState(**arrays, rounds=head["rounds"]), head["mechanism"])
