"""What the steps of a run write into the ledger: reserve, bind, commit, void, release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedemb.errors import LedgerError, PlanMismatch, Refused
from fedemb.keys import KeyStore, reservation_key_name
from fedemb.keys.signatures import Signer, sign_document
from fedemb.ledger.admission import admit
from fedemb.ledger.policy import PolicyLedger
from fedemb.ledger.records import Record
from fedemb.ledger.reservation import Reservation
from fedemb.ledger.state import ROUND_LOG_SCHEMA

CONTENT = (
    "purpose",
    "blocks_requested",
    "event",
    "relation",
    "delta",
    "rounds",
    "plan_sha",
    "config_sha",
    "code_sha",
    "input",
)
"""What a reservation binds; a retry must bring the same."""


class Ledger(PolicyLedger):
    """The ledger of one policy in one store."""

    def reserve(
        self,
        *,
        run_id: str,
        content: Mapping[str, Any],
        attempt: int | None = None,
    ) -> Reservation:
        """Charges a run before it reads private data.

        Args:
          run_id: name of the run, the idempotency key.
          content: `purpose`, `blocks_requested`, `event` (JSON), `relation`, `delta`, `rounds`,
            `plan_sha`, `config_sha`, `code_sha`, `input`.
          attempt: None continues the run's latest attempt; its number plus one starts another,
            charged in addition.

        Returns:
          The reservation; its `blocks` are those requested that are not full.

        Raises:
          BudgetExceeded: every requested block would pass its cap.
          PlanMismatch: the run exists with another content, or is not of the planned series.
        """
        if set(content) != set(CONTENT):
            raise LedgerError("a reservation has exactly the fields its docstring names")
        number = 0

        def decide() -> dict[str, Any] | Record:
            nonlocal number
            last = self.state.last_attempt(run_id)
            found = self.state.attempts.get((run_id, last if attempt is None else attempt))
            if found is not None and not (attempt is None and found.void):
                changed = [key for key in content if found.reserve.body[key] != content[key]]
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
        return Reservation.of(record)

    def bind(
        self,
        reservation: Reservation,
        *,
        inputs_sha: str,
        commitments: Mapping[str, str],
        private_root: str,
    ) -> Record:
        """Ties the attempt to what goes into it and to the one place that trains it.

        Done before round 0. Two trainers in one private root exclude one another by the records
        of their rounds; that there is no second root is for the ledger to say.

        Args:
          reservation: the attempt.
          inputs_sha: digest of everything that goes in.
          commitments: keyed commitments to private data, by name.
          private_root: keyed commitment to the working state of the trainer.

        Raises:
          PlanMismatch: it is bound to something else: what changed needs a new run.
          Refused: a trainer with another private root was there first, or it was given up.
        """
        body = {
            "reservation": reservation.sequence,
            "inputs_sha": inputs_sha,
            "commitments": dict(commitments),
            "private_root": private_root,
        }

        def decide() -> dict[str, Any] | Record:
            attempt = self.attempt(reservation)
            if attempt.void:
                raise Refused(f"run {reservation.run_id!r} was given up; reserve it again")
            if attempt.bind is None:
                return body
            changed = [key for key in body if attempt.bind.body[key] != body[key]]
            if changed == ["private_root"]:
                raise Refused(
                    f"run {reservation.run_id!r} trains, or trained, with another private root "
                    "(another storage.private_root, a copy of it, or the same path on another "
                    "machine), and two trainers would draw noise twice for one charge; resume it "
                    "where it began, or start a run with a new id"
                )
            if changed:
                raise PlanMismatch(
                    f"run {reservation.run_id!r} is bound to other {', '.join(changed)}: data, "
                    "code, weights or configuration changed since; start a run with a new id"
                )
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
          rounds_started: rounds whose noise was drawn, finished or not.
          round_log_sha: digest of the trainer's round log.
          card_sha: digest of `model.json`, which names the weights and whose key drew the noise.
          signer: the trainer's key, role `trainer`.
          keys: where the root key lies.

        Raises:
          PlanMismatch: it is committed with other figures, or more rounds than reserved.
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

        def decide() -> dict[str, Any] | Record:
            attempt = self.attempt(reservation)
            if attempt.commit is not None:
                signed = {**attempt.commit.body["round_log"], "signature": None}
                if signed != {**log, "signature": None}:
                    raise PlanMismatch(
                        f"run {reservation.run_id!r} is committed with another round log or model; "
                        "a closed attempt does not change, start a run with a new id"
                    )
                return attempt.commit
            if attempt.bind is None:
                raise LedgerError(f"run {reservation.run_id!r} was never bound; bind it first")
            if not 0 <= rounds_started <= reservation.rounds:
                raise PlanMismatch(
                    f"rounds_started={rounds_started}, expected at most the {reservation.rounds} "
                    "reserved"
                )
            self.chain.trust.require(signer.trusted())
            return body

        record = self._append("commit", decide, reservation=reservation)
        if keys is not None:
            keys.destroy(reservation_key_name(reservation.run_id, reservation.attempt))
        return record

    def void(self, reservation: Reservation, reason: str) -> Record:
        """Gives a reservation back that was never bound.

        Raises:
          Refused: it was bound, so its rounds may have started.
        """

        def decide() -> dict[str, Any] | Record:
            attempt = self.attempt(reservation)
            if attempt.void is not None:
                return attempt.void
            if attempt.bind is not None:
                raise Refused(
                    f"run {reservation.run_id!r} is {attempt.status}, so rounds may have started, "
                    "and stays charged; resume it, or let it be"
                )
            return {"reservation": reservation.sequence, "reason": reason}

        return self._append("void", decide, reservation=reservation)

    def release(self, reservation: Reservation, **body: str) -> Record:
        """Writes down that a bundle was published; the bundle anchors the head before it.

        Args:
          reservation: the attempt.
          **body: `model_sha`, `report_sha`, `bundle_sha`, `name`, `version`.

        Raises:
          Refused: the same name and version is released with another content.
        """
        content = {"reservation": reservation.sequence, **body}

        def decide() -> dict[str, Any] | Record:
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
