"""The log of committed rounds: a round with a record is never computed again.

A record holds the public line of the round, the mechanism's state after it, and the noised mean, so
that a trainer killed right after can resume. Correlated noise also depends on the tags of earlier
rounds: a record holds its own tag and a digest of all tags, so records have one size. Once a
checkpoint covers the round, the mean is removed; the record's name stays reserved permanently.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from pydantic import ValidationError

from fedemb.documents.evidence import write_rounds
from fedemb.documents.model import RoundHead, RoundLine
from fedemb.errors import ArtifactError, PlanMismatch
from fedemb.foundation.canonical_json import (
    JsonObject,
    canonical_json,
    sha256_hex,
    strict_json,
)
from fedemb.privacy.accounting.events import event_to_json
from fedemb.privacy.queries import Mechanism, RoundOutput, RoundState
from fedemb.storage import Store

_END = b"\n\0"
"""Separator between the header of a record and the bytes of the mean; invalid in JSON text."""


@dataclass(frozen=True)
class RoundRecord:
    """One committed round. Noised."""

    public: RoundLine
    """Line of the round in `rounds.jsonl`."""
    mechanism_state: RoundState
    """`Mechanism.round_state()` after the round."""
    tags_sha: str | None
    """Digest of the tags of all rounds up to it, see `TagChain`; None: rounds are independent."""
    mean: np.ndarray | None
    """float32 `[dim]`, noised mean update; None once a checkpoint covers it."""

    @property
    def index(self) -> int:
        """Number of the round, from 0."""
        return self.public.round


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
