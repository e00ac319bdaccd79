"""The ledger of one policy: its records, and every operation that adds a record.

    reserve -> bind -> rounds -> commit -> evaluation ... -> release
          `-> void (only while nothing was bound)

A reservation counts as fully spent until `commit` lowers the charge to the rounds that were
started. After a crash, a timeout or a kill, the reservation stays charged in full. Every operation
except `record_evaluation` is idempotent and decided on the latest state: the same content returns
the existing record, different content is refused. Each evaluation on held-out users is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from fedemb.documents.ledger_record import ChargeRecord, CommitRecord, PolicyRecord
from fedemb.errors import BudgetExceeded, LedgerError, PlanMismatch, Refused, Superseded
from fedemb.keys import KeyStore, derive, reservation_key_name
from fedemb.keys.trust import Signer, TrustedKey, sign_document
from fedemb.ledger.budget import Spent, external_charge
from fedemb.ledger.records import Anchor, Chain, Decide, Record, Reservation
from fedemb.ledger.state import ROUND_LOG_SCHEMA, Attempt, LedgerState, admit
from fedemb.ledger.terms import PolicyTerms, ReservedContent


class Ledger:
    """The ledger of one policy in one store."""

    def __init__(self, chain: Chain, signer: Signer | None = None):
        """Wraps a chain; without a signer the ledger is read-only."""
        self.chain = chain
        self._signer = signer
        self._state = LedgerState()

    @property
    def policy_id(self) -> str:
        """Id of the policy that the ledger belongs to."""
        return self.chain.policy_id

    @property
    def head(self) -> Record:
        """The last record as of the last refresh."""
        return self.chain.head

    @property
    def state(self) -> LedgerState:
        """All records so far, replayed."""
        fresh = self.chain.records[self._state.replayed :]
        self._state.replay(fresh, self.chain.trust)
        return self._state

    @property
    def terms(self) -> PolicyTerms:
        """Returns the fixed terms of the policy.

        Raises:
          LedgerError: the ledger is empty.
        """
        terms = self.state.terms
        if terms is None:
            raise LedgerError(
                f"no ledger of policy {self.policy_id!r} in {self.chain.store.uri}; create "
                "one with `fedemb ledger init`, or name the right store"
            )
        return terms

    def refresh(self, *, signatures: bool = False) -> None:
        """Reads and verifies the records that were added since the last refresh.

        Args:
          signatures: see `Chain.refresh`.

        Raises:
          LedgerError: the ledger is broken, or was created with other trusted keys.
          SignatureInvalid: a record was changed or is signed by an unknown key.
        """
        self.chain.refresh(signatures=signatures)
        for policy in self.chain.records[:1]:
            first = policy.content(PolicyRecord).terms.get("trust_sha", "")
            if first not in ("", self.chain.trust_sha):
                raise LedgerError(
                    f"policy {self.policy_id!r} was created with another trust.json, so a key was "
                    "added or removed since; restore the trust.json that the policy owner published"
                )

    def spent(self, block: str) -> Spent:
        """Returns the cumulative privacy loss of a block."""
        return self.state.spent(block)

    def verify(self, anchors: Iterable[Anchor] = ()) -> None:
        """Checks bytes, chain, signatures, rules, caps, and records that are anchored elsewhere.

        Raises:
          LedgerError: a check failed; the message names the record.
          SignatureInvalid: a record was changed or is signed by an unknown key.
          BudgetExceeded: a block is over its cap.
        """
        self.refresh(signatures=True)
        self.chain.check_anchors(anchors)
        cap = self.terms.epsilon_cap
        for block in self.state.by_block:
            # A declared loss may exceed the cap, because it was spent elsewhere. Then no run is
            # admitted to the block, and the gate denies its models; the ledger is still intact.
            epsilon = self.state.spent_by_runs(block).epsilon
            if not epsilon <= cap:
                raise BudgetExceeded(
                    f"block {block} has epsilon={epsilon:.4g} above its cap {cap:g}, which no "
                    "reservation allows; restore the ledger from its backup"
                )

    def attempt(self, reservation: Reservation) -> Attempt:
        """Returns the attempt of a reservation that matches its ledger record.

        Raises:
          LedgerError: the reservation does not match the ledger.
        """
        self.chain.check_anchors([reservation.anchor])
        attempt = self.state.attempts.get((reservation.run_id, reservation.attempt))
        if attempt is None or Reservation.of(attempt.reserve.document) != reservation:
            raise LedgerError(
                f"the reservation of run {reservation.run_id!r} says something else than record "
                f"{reservation.sequence} of the ledger; run reserve_budget again"
            )
        return attempt

    def unlock(self, keys: KeyStore) -> None:
        """Loads the key of the role `ledger` from the key store, which makes the ledger writable.

        Raises:
          LedgerError: the key store has no such key, or a key that the ledger does not trust.
        """
        self._signer = Signer.current(keys, "ledger", self.chain.trust)

    def create_policy(self, terms: PolicyTerms, signer: Signer) -> Record:
        """Writes record 0. Idempotent for the same terms.

        Args:
          terms: terms fixed for the life of the policy.
          signer: the policy owner's key, role `policy`.

        Raises:
          Refused: the policy exists with other terms, or a term is out of bounds.
        """

        def decide() -> Mapping[str, object] | Record:
            if not self.chain.records:
                PolicyTerms.from_json(terms.to_json())  # reject terms that readers would reject
                return {"terms": terms.to_json()}
            self.check_terms(terms)
            return self.chain.records[0]

        return self._append("policy", decide, signer=signer)

    def check_terms(self, terms: PolicyTerms) -> None:
        """Checks that the given terms equal the policy's terms.

        Raises:
          Refused: terms differ; the message lists them.
        """
        changed = self.terms.differences(terms)
        if changed:
            raise Refused(
                f"policy {self.policy_id!r} does not fit: {'; '.join(changed)}. Set it back, or "
                "start another policy_id and add up the epsilons of both"
            )

    def charge(self, declared: ChargeRecord, signer: Signer) -> Record:
        """Records the declared privacy loss of a release made elsewhere on the same users.

        Args:
          declared: content of the record.
          signer: the policy owner's key, role `policy`.

        Raises:
          Refused: the policy cannot compose the charge, or the name has a different charge.
        """
        body = vars(declared)

        def decide() -> Mapping[str, object] | Record:
            external_charge(self.terms, declared)
            for record in self.state.external:
                if record.body["name"] == declared.name:
                    if dict(record.body) == body:
                        return record
                    raise Refused(
                        f"external charge {declared.name!r} is recorded with other content. Choose "
                        "another name"
                    )
            return body

        self.refresh()
        return self._append("charge", decide, signer=signer)

    def rotate(self, keys: Sequence[TrustedKey], reason: str, signer: Signer) -> Record:
        """Records the next generation of signing keys and retires the previous generation.

        Earlier signatures of a retired key stay trusted; later signatures are rejected.

        Args:
          keys: public keys, at most one per role.
          reason: reason for the rotation, kept in the ledger permanently.
          signer: the policy owner's key as trusted so far, role `policy`.

        Raises:
          LedgerError: a key is not of a later generation than the key it replaces.
        """
        named = [key.to_json() for key in keys]

        def decide() -> Mapping[str, object] | Record:
            for record in self.state.rotations:
                if record.body["keys"] == named:
                    return record
            self.chain.trust.rotated(named, len(self.chain.records))  # raises before readers would
            return {"keys": named, "reason": reason}

        return self._append("keys", decide, signer=signer)

    def name_approvers(self, approvers: Mapping[str, str], reason: str, signer: Signer) -> Record:
        """Sets the complete list of people who may approve releases from now on.

        Args:
          approvers: name -> public key, raw Ed25519 in hexadecimal digits.
          reason: reason for the change, kept in the ledger permanently.
          signer: the policy owner's key, role `policy`.

        Raises:
          LedgerError: a key is listed twice, or was removed before.
        """
        body = {"approvers": dict(approvers), "reason": reason}

        def decide() -> Mapping[str, object]:
            self.chain.trust.with_approvers(approvers.values(), len(self.chain.records))
            return body

        return self._append("approvers", decide, signer=signer)

    def decide(
        self,
        reservation: Reservation,
        *,
        code: str,
        model_sha: str,
        report_sha: str | None,
        reason: str,
        signer: Signer,
    ) -> Record:
        """Records a person's decision that removes one reason of the gate for one model.

        Args:
          reservation: reservation of the run.
          code: `not_approved` for an approval, otherwise the code of the waived rule.
          model_sha: SHA-256 of the weights.
          report_sha: SHA-256 of the approved report, which names all of its inputs; None: a waiver.
          reason: reason, kept in the ledger permanently.
          signer: key of the person, role `approver`, or of the policy owner, role `policy`.

        Raises:
          Refused: the key does not belong to an approver, or the run is not committed for release.
        """
        body = {
            "reservation": reservation.sequence,
            "code": code,
            "model_sha": model_sha,
            "report_sha": report_sha,
            "reason": reason,
        }

        def decide() -> Mapping[str, object] | Record:
            attempt = self.attempt(reservation)
            if not attempt.commit or reservation.purpose != "release":
                raise Refused(
                    f"run {reservation.run_id!r} is {attempt.status}, for {reservation.purpose}; "
                    "people decide only about a committed run with purpose release"
                )
            if report_sha is None:
                return self.state.waivers_of(model_sha).get(code, body)
            for record in self.state.approvals_of(model_sha, report_sha):
                if record.signature["key_id"] == signer.key_id or record.actor == name:
                    return record
            return body

        self.refresh()
        name = None if report_sha is None else self.state.approvers.get(signer.public_key)
        if report_sha is not None and name is None:
            raise Refused(
                f"key {signer.key_id} does not belong to an approver of policy "
                f"{self.policy_id!r}; ask the policy owner to add it by `fedemb ledger approvers`"
            )
        return self._append("decision", decide, reservation=reservation, signer=signer, actor=name)

    def reserve(
        self, *, run_id: str, content: ReservedContent, attempt: int | None = None
    ) -> Reservation:
        """Charges a run before it reads private data.

        Args:
          run_id: id of the run, used as the idempotency key.
          content: content that the reservation binds.
          attempt: None continues the run's latest attempt; the latest number plus one starts
              another attempt, charged in addition.

        Returns: The reservation; its `blocks` are the requested blocks that are not full.

        Raises:
          BudgetExceeded: every requested block would exceed its cap.
          PlanMismatch: the run exists with different content, or is not part of the planned series.
        """
        fields = ReservedContent.__required_keys__
        if content.keys() != fields:
            raise LedgerError(
                f"a reservation has the fields {', '.join(sorted(fields))}, got "
                f"{', '.join(sorted(content))}; pass exactly these fields"
            )
        number, asked = 0, cast("Mapping[str, object]", content)

        def decide() -> Mapping[str, object] | Record:
            nonlocal number
            last = self.state.last_attempt(run_id)
            found = self.state.attempts.get((run_id, last if attempt is None else attempt))
            if found is not None and not (attempt is None and found.void):
                changed = [key for key in asked if found.reserve.body[key] != asked[key]]
                if changed:
                    raise PlanMismatch(
                        f"run {run_id!r} attempt {found.reserve.attempt} is reserved with another "
                        f"{', '.join(changed)}; start a run with a new id"
                    )
                return found.reserve
            number = last + 1
            if attempt is not None and attempt != last + 1:
                raise Refused(
                    f"attempt={attempt} of run {run_id!r}, expected {last + 1}: attempts have no "
                    "gaps; name the next one"
                )
            return {**content, "blocks": admit(self.state, self.policy_id, run_id, content)}

        record = self._append("reserve", decide, run_id=run_id, attempt=lambda: number)
        return Reservation.of(record.document)

    def bind(
        self,
        reservation: Reservation,
        *,
        inputs_sha: str,
        commitments: Mapping[str, str],
        private_root: str,
        keys: KeyStore | None = None,
    ) -> Record:
        """Binds the attempt to its inputs and to the only private root that may train it.

        Called before round 0. The round records exclude two trainers in the same private root; the
        ledger ensures that there is only one private root.

        Args:
          reservation: the attempt.
          inputs_sha: SHA-256 of all inputs.
          commitments: keyed commitments to private data, by name.
          private_root: keyed commitment to the working state of the trainer.
          keys: key store with the root key, to which the record commits.

        Raises:
          PlanMismatch: the attempt is bound to different inputs; changed inputs need a new run.
          Refused: a trainer with another private root bound the attempt first, or it is void.
        """
        body = {
            "reservation": reservation.sequence,
            "inputs_sha": inputs_sha,
            "commitments": dict(commitments),
            "private_root": private_root,
            "key_sha": _key_sha(keys, reservation),
        }

        def decide() -> Mapping[str, object] | Record:
            attempt = self.attempt(reservation)
            if attempt.void:
                raise Refused(f"run {reservation.run_id!r} was given up; reserve it again")
            if attempt.bind is None:
                return body
            given = {name: value for name, value in body.items() if value is not None}
            changed = [key for key in given if attempt.bind.body[key] != given[key]]
            _require_unchanged(reservation.run_id, changed)
            return attempt.bind

        return self._append("bind", decide, reservation=reservation)

    def commit(
        self,
        reservation: Reservation,
        *,
        rounds_started: int,
        round_log_sha: str,
        card_sha: str,
        signer: Signer,
        keys: KeyStore | None = None,
    ) -> Record:
        """Closes an attempt, lowers its charge to the rounds started and destroys its root key.

        Args:
          reservation: the attempt.
          rounds_started: number of rounds whose noise was drawn, completed or not.
          round_log_sha: SHA-256 of the trainer's round log.
          card_sha: SHA-256 of `model.json`, which names the weights and the key that drew the
              noise.
          signer: the trainer's key, role `trainer`.
          keys: key store with the root key.

        Raises:
          PlanMismatch: it is committed with other values, or more rounds than reserved.
          SignatureInvalid: the trainer's key is not trusted.
          StorageError: the trainer's key was rotated; run again.
        """
        log = {
            "schema": ROUND_LOG_SCHEMA,
            "run_id": reservation.run_id,
            "attempt": reservation.attempt,
            "rounds_started": rounds_started,
            "sha": round_log_sha,
            "card_sha": card_sha,
        }
        body = {
            "reservation": reservation.sequence,
            "rounds_started": rounds_started,
            "round_log": sign_document(log, signer),
        }

        def decide() -> Mapping[str, object] | Record:
            attempt = self.attempt(reservation)
            if attempt.commit is not None:
                _require_same_log(attempt.commit, log)
                return attempt.commit
            if attempt.bind is None:
                raise LedgerError(f"run {reservation.run_id!r} was never bound; bind it first")
            if not 0 <= rounds_started <= reservation.rounds:
                raise PlanMismatch(
                    f"rounds_started={rounds_started}, expected at most the {reservation.rounds} "
                    "reserved rounds; give up the run and start a new one"
                )
            self.chain.trust.require(signer.trusted())
            return body

        record = self._append("commit", decide, reservation=reservation)
        if keys is not None:
            keys.destroy(reservation_key_name(reservation.run_id, reservation.attempt))
        return record

    def void(self, reservation: Reservation, reason: str, keys: KeyStore | None = None) -> Record:
        """Refunds a reservation that was never bound, and destroys its root key.

        Args:
          reservation: the attempt.
          reason: reason for the refund, kept in the record.
          keys: key store with the root key. A destroyed key proves that the attempt was committed,
              even if the ledger lost its later records.

        Raises:
          Refused: the attempt was bound or committed, so its rounds may have started.
        """
        name = reservation_key_name(reservation.run_id, reservation.attempt)

        def decide() -> Mapping[str, object] | Record:
            attempt = self.attempt(reservation)
            if attempt.void is not None:
                return attempt.void
            if attempt.bind is not None:
                raise Refused(
                    f"run {reservation.run_id!r} is {attempt.status}, so rounds may have started, "
                    "and it is charged; resume it, otherwise it stays charged"
                )
            if keys is not None and keys.used(name) and not keys.exists(name):
                raise Refused(
                    f"the key of run {reservation.run_id!r} was destroyed, as at the commit, and "
                    "this ledger is older than its runs; restore the newest backup"
                )
            return {"reservation": reservation.sequence, "reason": reason}

        record = self._append("void", decide, reservation=reservation)
        if keys is not None and keys.used(name):
            keys.destroy(name)
        return record

    def release(self, reservation: Reservation, **body: str) -> Record:
        """Records that a bundle was published; the bundle anchors the previous ledger head.

        Args:
          reservation: the attempt.
          **body: `model_sha`, `report_sha`, `bundle_sha`, `name`, `version`.

        Raises:
          Refused: the same name and version is already released with different content.
        """
        content = {"reservation": reservation.sequence, **body}

        def decide() -> Mapping[str, object] | Record:
            attempt = self.attempt(reservation)
            for record in attempt.releases:
                if record.body == content:
                    return record
            for other in self.state.attempts.values():
                for record in other.releases:
                    if all(record.body[key] == body[key] for key in ("name", "version")):
                        raise Refused(
                            f"{body['name']} {body['version']} is released already; choose another "
                            "release.version"
                        )
            return content

        return self._append("release", decide, reservation=reservation)

    def record_evaluation(self, run_id: str, model_sha: str, signer: Signer) -> Record:
        """Records an evaluation on held-out users before it starts.

        Every call counts, because results that were seen before later choices are less reliable.
        The record is also the fencing token of an evaluation that a cluster starts twice, see
        `check_latest_evaluation`.

        Args:
          run_id: id of the run that trained the model.
          model_sha: SHA-256 of the weights.
          signer: key of the role `evaluate`.

        Raises:
          Refused: the run is not committed in this ledger.
        """

        def decide() -> Mapping[str, object] | Record:
            attempt = self.state.attempts.get((run_id, self.state.last_attempt(run_id)))
            if attempt is None or attempt.commit is None:
                raise Refused(
                    f"run {run_id!r} has no committed model in the ledger of policy "
                    f"{self.policy_id!r}, so there is nothing to measure; finish its training"
                )
            return {"reservation": attempt.reserve.sequence, "model_sha": model_sha}

        return self._append(
            "evaluation",
            decide,
            run_id=run_id,
            attempt=lambda: self.state.last_attempt(run_id),
            signer=signer,
        )

    def check_latest_evaluation(self, evaluation: Record) -> None:
        """Checks the fencing token: only the newest evaluation of a run may continue.

        Raises:
          Superseded: a newer evaluation of the same run has started.
        """
        self.refresh()
        for later in self.state.evaluations:
            if later.run_id == evaluation.run_id and later.sequence > evaluation.sequence:
                raise Superseded(
                    f"the evaluation of run {evaluation.run_id!r} was started again while this "
                    "process ran; only the newer one continues. No action is needed; see the newer "
                    "pod."
                )

    def _append(
        self,
        kind: str,
        decide: Decide,
        *,
        reservation: Reservation | None = None,
        run_id: str = "",
        attempt: Callable[[], int] = lambda: 0,
        signer: Signer | None = None,
        actor: str | None = None,
    ) -> Record:
        signer = signer or self._signer
        if signer is None:
            raise Refused(
                f"a {kind} record cannot be written: the ledger was opened without a key; open it "
                "with the signer of the role"
            )
        if reservation is not None:
            run_id, number = reservation.run_id, reservation.attempt
            attempt = lambda: number  # noqa: E731
        return self.chain.append(
            decide,
            kind=kind,
            run_id=run_id,
            attempt=attempt,
            actor=actor or os.environ.get("FEDEMB_ACTOR") or "unnamed",
            signer=signer,
        )


def _key_sha(keys: KeyStore | None, reservation: Reservation) -> str | None:
    """Returns a commitment to the root key of an attempt; None: destroyed after the commit."""
    name = reservation_key_name(reservation.run_id, reservation.attempt)
    if keys is None or not keys.exists(name):
        return None
    return derive(keys.fetch(name), "commitment").hex()


def _require_unchanged(run_id: str, changed: list[str]) -> None:
    """Refuses to bind an attempt again with other inputs.

    Raises:
      Refused: only the private root is another one.
      PlanMismatch: other inputs changed.
    """
    if changed == ["private_root"]:
        raise Refused(
            f"run {run_id!r} was trained with another private root: another "
            "storage.private_root, a copy, or the same path on another machine. Two "
            "trainers would draw noise twice for one charge. Resume where the run "
            "started, or start a run with a new id"
        )
    if changed:
        raise PlanMismatch(
            f"run {run_id!r} is bound to other {', '.join(changed)}: data, "
            "code, weights or configuration changed since; start a run with a new id"
        )


def _require_same_log(committed: Record, log: Mapping[str, object]) -> None:
    """Raises PlanMismatch if an attempt was committed with another round log."""
    signed = {**committed.content(CommitRecord).round_log, "signature": None}
    if signed != {**log, "signature": None}:
        raise PlanMismatch(
            f"run {committed.run_id!r} is committed with another round log or model; "
            "a closed attempt does not change, start a run with a new id"
        )
