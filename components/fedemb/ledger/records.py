"""Records of the ledger: signed entries, their hash chain in a store, and reservations."""

from __future__ import annotations

import functools
import os
import re
import secrets
import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict, TypeVar

from fedemb.documents.fields import Count, Name, Sha
from fedemb.documents.ledger_record import (
    ApproversRecord,
    DecisionRecord,
    KeysRecord,
    LedgerHead,
    LedgerRecord,
    ReserveRecord,
)
from fedemb.errors import ArtifactError, LedgerError, StorageError
from fedemb.foundation.canonical_json import ToJson, canonical_json
from fedemb.foundation.document import Part, Written, parse, read, written
from fedemb.keys.trust import APPROVER, Signer, TrustStore
from fedemb.storage import Store

GENESIS = "0" * 64
"""`previous` of record 0."""
P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Record:
    """A record of the ledger."""

    policy_id: str
    sequence: int
    previous: str
    """SHA-256 of the bytes of the previous record."""
    act: str
    """Kind of the record: a key of `documents.ledger_record.BODIES`."""
    run_id: str
    """Id of the run; empty for records about the whole policy."""
    attempt: int
    time: str
    """UTC time, for display; only `sequence` defines the order."""
    actor: str
    body: Mapping[str, ToJson]
    """Content as JSON; `content` returns it with types."""
    document: Written[LedgerRecord]

    @property
    def kind(self) -> str:
        """Kind of the record as stored: `policy`, `reserve`, ..."""
        return self.act

    def content(self, expected: type[P]) -> P:
        """Returns the content as the class of its kind, see `documents.ledger_record.BODIES`.

        Raises:
          LedgerError: the record is of another kind.
        """
        content = self.document.body.body
        if not isinstance(content, expected):
            raise LedgerError(
                f"ledger record {self.name} is of the kind {self.kind!r} and has no content of a "
                f"{expected.__name__}; restore the ledger from its backup"
            )
        return content

    @property
    def signature(self) -> Mapping[str, str]:
        """Key id, algorithm and value of the signature."""
        return self.document.signature or {}

    @property
    def sha(self) -> str:
        """SHA-256 of the bytes."""
        return self.document.sha

    @property
    def name(self) -> str:
        """Name of the record in the store."""
        return record_name(self.policy_id, self.sequence)

    @functools.cached_property
    def event(self) -> bytes:
        """Canonical JSON of a reservation's event."""
        return canonical_json(self.body["event"])

    def verify(self, trust: TrustStore) -> None:
        """Checks the signature.

        Raises:
          SignatureInvalid: the key is unknown, or the signature does not match the content.
        """
        check_record(self.document, trust)


def check_record(record: Written[LedgerRecord], trust: TrustStore) -> None:
    """Checks the signature of a record with the keys trusted at its place in the ledger.

    Raises:
      SignatureInvalid: the key is unknown, or the signature does not match the content.
    """
    body = record.body
    role, name = signing_role(body), record_name(body.policy_id, body.sequence)
    trust.verify(record.signed_bytes, record.signature, role, name, at=body.sequence)


def record_name(policy_id: str, sequence: int) -> str:
    """Returns the name of a record in the store."""
    return f"{policy_id}/{sequence:08d}.json"


def signing_role(record: LedgerRecord) -> str:
    """Returns the role whose key signs a record."""
    if isinstance(record.body, DecisionRecord):
        return "policy" if record.body.report_sha is None else APPROVER
    if record.act == "evaluation":
        return "evaluate"
    return "policy" if record.act in ("policy", "keys", "approvers", "charge") else "ledger"


class RecordContent(TypedDict):
    """Content of a record, before it is signed."""

    policy_id: str
    sequence: int
    previous: str
    """SHA-256 of the record before it."""
    kind: str
    run_id: str
    attempt: int
    time: str
    """UTC, ISO 8601."""
    actor: str
    body: Mapping[str, object]


def encode_record(content: RecordContent, signer: Signer) -> bytes:
    """Returns the signed bytes of a record.

    Raises:
      LedgerError: the content does not match its kind, or the signer lacks the role of the kind.
    """
    kind = content["kind"]
    try:
        record = LedgerRecord.of_fields({**content, "body": dict(content["body"])})
    except ArtifactError as error:
        raise LedgerError(
            f"a {kind} record cannot be written: {error}; correct the value and retry"
        ) from error
    role = signing_role(record)
    if signer.role != role:
        raise LedgerError(
            f"a {kind} record needs a key of the role {role!r}, got {signer.role!r}; use the "
            "signer of that role"
        )
    return written(record, signer.sign(record.content())).data


def decode_record(data: bytes, name: str, *, canonical: bool = True) -> Record:
    """Decodes the bytes of a record; `Record.verify` checks the signature.

    Args:
      data: the bytes as stored.
      name: name in the store, which must match the record's policy and sequence.
      canonical: False skips the check for canonical encoding; the hash chain covers it.

    Raises:
      LedgerError: not a canonical record.
    """
    try:
        document = parse(data, LedgerRecord, name, exact=canonical)
    except (ArtifactError, RecursionError) as error:
        problem = str(error).partition(";")[0]
        raise LedgerError(
            f"ledger record {name} is broken: {problem}; restore the ledger from its backup"
        ) from error
    fields = document.body
    record = Record(
        policy_id=fields.policy_id,
        sequence=fields.sequence,
        previous=fields.previous,
        act=fields.act,
        run_id=fields.run_id,
        attempt=fields.attempt,
        time=fields.time,
        actor=fields.actor,
        body=vars(fields.body),  # nested values are JSON
        document=document,
    )
    problem = None
    if document.signature is None:
        problem = "it is not signed"
    elif record.name != name:
        problem = "it belongs elsewhere"
    if problem:
        raise LedgerError(
            f"ledger record {name} is broken: {problem}; restore the ledger from its backup"
        )
    return record


HEADS = "heads"
"""Folder of the signed heads, one per record."""
CLOCK_TOLERANCE = timedelta(minutes=10)
"""Maximum clock difference between this machine and the store."""
_NUMBERED = re.compile(r"[0-9]{8}\.json")
_RETRIES = 10_000
_PARALLEL_READS = 32
_READS_AT_ONCE = 16 * _PARALLEL_READS


Decide = Callable[[], Mapping[str, object] | Record]
"""Reads the latest state; returns the content to write, or the existing record of that content."""


@dataclass(frozen=True)
class Anchor:
    """The number and digest of a record as stored outside the ledger."""

    sequence: int
    sha: str
    where: str
    """Source of the anchor, used in error messages."""


class Chain:
    """The records of one policy; each record is verified once, when it is read."""

    def __init__(self, store: Store, policy_id: str, trust: TrustStore):
        self.store = store
        self.policy_id = policy_id
        self.trust = trust
        """Trusted keys: those of the trust file and those added by records."""
        self.trust_sha = trust.digest
        """Digest of the trust file only."""
        self.records: list[Record] = []
        self._vouched: list[Record] = []
        """Records whose signature was not verified, because a signed head covers them."""

    @property
    def head(self) -> Record:
        """Returns the last record.

        Raises:
          LedgerError: the ledger is empty.
        """
        if not self.records:
            raise LedgerError(
                f"no ledger of policy {self.policy_id!r} in {self.store.uri}; create one "
                "with `fedemb ledger init`, or name the right store"
            )
        return self.records[-1]

    def refresh(self, *, signatures: bool) -> None:
        """Reads and verifies the records that were added since the last refresh.

        Args:
          signatures: True verifies every signature. False trusts the newest signed head for the
              records before it that the same key signed, because the hash chain covers them.

        Raises:
          LedgerError: a record is missing or broken, or the chain does not hold.
          SignatureInvalid: a record was changed, or signed by an unknown key.
        """
        known, heads = len(self.records), self._highest(f"{self.policy_id}/{HEADS}")
        last = max(heads, self._highest(self.policy_id), known - 1)
        fresh = self._read(range(known, last + 1))
        while (data := self._read_one(known + len(fresh))) is not None:
            fresh.append(data)
        self.extend(fresh, self._newest_head(heads) if heads >= 0 else None)
        for record in self._vouched if signatures else ():
            decode_record(record.document.data, record.name).verify(self.trust)
        self._vouched = [] if signatures else self._vouched

    def extend(self, fresh: Sequence[bytes], head: Written[LedgerHead] | None = None) -> None:
        """Verifies the bytes of the next records and appends them in memory.

        Args:
          fresh: bytes of the records.
          head: signed head that replaces the signatures of earlier records by the same key.

        Raises:
          LedgerError: a record is broken, or does not follow the previous record.
          SignatureInvalid: a record was changed, or signed by an unknown key.
        """
        covered = head.body.sequence if head else -1
        key = head.signature["key_id"] if head and head.signature else None
        whole, trust = [*self.records], self.trust
        vouched: list[Record] = []
        for data in fresh:
            name = record_name(self.policy_id, len(whole))
            record = decode_record(data, name, canonical=len(whole) >= covered)
            previous = whole[-1].sha if whole else GENESIS
            if record.previous != previous:
                raise LedgerError(
                    f"ledger record {record.name} does not follow the record before it: one of "
                    "the two was changed or replaced; restore the ledger from its backup"
                )
            signed_alike = signing_role(record.document.body) == LedgerHead.role
            if signed_alike and record.sequence < covered and record.signature["key_id"] == key:
                vouched.append(record)
            else:
                record.verify(trust)
            trust = _trust_after(record, trust)
            whole.append(record)
        if head is not None:  # its key is known only after the records are read
            trust.check(head, at=covered)
            _check_anchors(whole, [Anchor(covered, head.body.sha, "the signed head")])
        self.records, self.trust = whole, trust
        self._vouched += vouched

    def check_anchors(self, anchors: Iterable[Anchor]) -> None:
        """Compares the records with digests stored outside the ledger.

        Raises:
          LedgerError: the ledger was truncated or rewritten since an anchor was stored.
        """
        _check_anchors(self.records, anchors)

    def append(
        self,
        decide: Decide,
        *,
        kind: str,
        run_id: str,
        attempt: Callable[[], int],
        actor: str,
        signer: Signer,
    ) -> Record:
        """Appends a record; if another writer was faster, calls `decide` again on the new state.

        Args:
          decide: reads the refreshed records and returns the body to write, or an existing record
              with the same content; raises to refuse.
          kind: kind of the record.
          run_id: id of the run, or empty.
          attempt: returns the number of the attempt; called after `decide`.
          actor: name of the writer.
          signer: key of the role that signs this kind.
        """
        for _ in range(_RETRIES):
            self.refresh(signatures=False)
            decision = decide()
            if isinstance(decision, Record):
                if decision is self.head and signer.role == "ledger":
                    self.write_head(decision, signer)  # a killed writer may have left none
                return decision
            sequence = len(self.records)
            self.trust.require(signer.trusted())
            content = RecordContent(
                policy_id=self.policy_id,
                sequence=sequence,
                previous=self.head.sha if self.records else GENESIS,
                kind=kind,
                run_id=run_id,
                attempt=attempt(),
                time=self._now().isoformat(timespec="seconds"),
                actor=actor,
                body=decision,
            )
            data = encode_record(content, signer)
            record = decode_record(data, record_name(self.policy_id, sequence))
            record.verify(self.trust)
            try:
                self.store.create(record.name, data)
            except FileExistsError:
                clock.sleep(secrets.randbelow(20) / 200)
                continue
            self.records.append(record)
            self.trust = _trust_after(record, self.trust)
            if signer.role == "ledger":
                self.write_head(record, signer)
            return record
        raise StorageError(
            f"the ledger of policy {self.policy_id!r} changed {_RETRIES} times while this record "
            "was written; run again"
        )

    def _now(self) -> datetime:
        """Returns the time of a new record, not before that of the newest.

        Raises:
          StorageError: the local clock differs too much from the store's clock.
        """
        now, there = datetime.now(UTC), self.store.clock()
        if there is not None and abs(now - there) > CLOCK_TOLERANCE:
            raise StorageError(
                f"the clock of this machine shows {now:%Y-%m-%d %H:%M} UTC, and that of "
                f"{self.store.uri} {there:%Y-%m-%d %H:%M}. Nothing was written, because the date "
                "of the record would be wrong. Correct the clock and retry"
            )
        return max([now, *(datetime.fromisoformat(each.time) for each in self.records[-1:])])

    def _highest(self, folder: str) -> int:
        """Returns the highest numbered object directly in a folder, or -1; ignores other names."""
        if self.store.local_root is not None:
            path = self.store.local_root / folder
            names = os.listdir(path) if path.is_dir() else []  # noqa: PTH208  ten times faster
        else:
            listed = (name.removeprefix(f"{folder}/") for name in self.store.list(f"{folder}/"))
            names = [name for name in listed if "/" not in name]
        return max((int(name[:8]) for name in names if _NUMBERED.fullmatch(name)), default=-1)

    def _read_one(self, sequence: int) -> bytes | None:
        try:
            return self.store.read(record_name(self.policy_id, sequence))
        except FileNotFoundError:
            return None

    def _read(self, sequences: range) -> list[bytes]:
        whole: list[bytes] = []
        for sequence, data in zip(sequences, self._found(sequences), strict=True):
            if data is None:
                raise LedgerError(
                    f"ledger record {record_name(self.policy_id, sequence)} is missing while later "
                    "ones exist: it was lost or deleted; restore the ledger from its backup"
                )
            whole.append(data)
        return whole

    def _found(self, sequences: range) -> Iterator[bytes | None]:
        """Yields the records of a range, fetched a few at a time; stops at the first gap."""
        if self.store.local_root is not None:
            yield from map(self._read_one, sequences)
            return
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            for first in range(0, len(sequences), _READS_AT_ONCE):
                yield from pool.map(self._read_one, sequences[first : first + _READS_AT_ONCE])

    def _head_name(self, sequence: int) -> str:
        return f"{self.policy_id}/{HEADS}/{sequence:08d}.json"

    def _newest_head(self, newest: int) -> Written[LedgerHead]:
        """Returns the newest listed head; if the listing lags, an older head is valid as well."""
        name = self._head_name(newest)
        try:
            data = self.store.read(name)
        except FileNotFoundError as error:
            raise LedgerError(
                f"{name} is missing although the store lists it; restore the ledger from its backup"
            ) from error
        try:
            head = parse(data, LedgerHead, name)
        except ArtifactError as error:
            raise LedgerError(f"{error}; restore the ledger from its backup") from error
        if (head.body.policy_id, head.body.sequence) != (self.policy_id, newest):
            raise LedgerError(f"{name} belongs to another policy or record; restore the ledger")
        return head

    def write_head(self, record: Record, signer: Signer) -> None:
        """Writes the head under a new name, because a locked bucket does not allow replacement."""
        self.trust.require(signer.trusted())
        head = LedgerHead(policy_id=self.policy_id, sequence=record.sequence, sha=record.sha)
        data = written(head, signer.sign(head.content())).data
        with suppress(FileExistsError):
            self.store.create(self._head_name(record.sequence), data)


def _check_anchors(records: Sequence[Record], anchors: Iterable[Anchor]) -> None:
    for anchor in anchors:
        if anchor.sequence >= len(records):
            raise LedgerError(
                f"the ledger ends at record {len(records) - 1}, but {anchor.where} names "
                f"record {anchor.sequence}: its tail was cut; restore it from its backup"
            )
        if records[anchor.sequence].sha != anchor.sha:
            raise LedgerError(
                f"ledger record {records[anchor.sequence].name} is not the one that "
                f"{anchor.where} names: it was rewritten; restore the ledger from its backup"
            )


def _trust_after(record: Record, trust: TrustStore) -> TrustStore:
    """Returns the keys trusted for the records after this one."""
    match record.kind:
        case "keys":
            return trust.rotated(record.content(KeysRecord).keys, record.sequence)
        case "approvers":
            return trust.with_approvers(
                record.content(ApproversRecord).approvers.values(), record.sequence
            )
        case _:
            return trust


class Reservation(ReserveRecord):
    """One attempt of one run, charged to its blocks."""

    policy_id: Name
    run_id: Name
    attempt: Count
    sequence: Count
    """Number of the ledger record."""
    record_sha: Sha

    @classmethod
    def of(cls, record: Written[LedgerRecord]) -> Reservation:
        """Returns the reservation in a `reserve` record.

        Raises:
          ArtifactError: the record is of another kind.
        """
        fields = record.body
        if not isinstance(fields.body, ReserveRecord):
            raise ArtifactError(
                f"ledger record {fields.sequence} of the kind {fields.act!r} is not a reservation; "
                "run reserve_budget again"
            )
        return cls(
            **vars(fields.body),
            policy_id=fields.policy_id,
            run_id=fields.run_id,
            attempt=fields.attempt,
            sequence=fields.sequence,
            record_sha=record.sha,
        )

    @property
    def anchor(self) -> Anchor:
        """The ledger anchor in the reservation."""
        return Anchor(self.sequence, self.record_sha, f"the reservation of run {self.run_id!r}")


def read_reservation(path: Path, trust: TrustStore | None = None) -> Reservation:
    """Reads the document of a reservation.

    Args:
      path: the document.
      trust: keys that verify the signature. None leaves the check to `Ledger.attempt`, which
          compares the whole reservation with its signed record.

    Raises:
      ArtifactError: not a reservation of this version.
      SignatureInvalid: the document was changed, or signed by an unknown key.
    """
    document = read(path, LedgerRecord)
    if trust is not None:
        check_record(document, trust)
    return Reservation.of(document)
