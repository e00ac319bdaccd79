"""The state of a ledger: attempts, charges and the rules that every record must follow.

Replaying the records from record 0 gives the state. A record that breaks a rule is an error during
replay, so readers reject every record that writers must not add.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NoReturn

from fedemb.documents.ledger_record import (
    ApproversRecord,
    AttemptRecord,
    ChargeRecord,
    CommitRecord,
    DecisionRecord,
    PolicyRecord,
    ReserveRecord,
)
from fedemb.documents.verdict import NOT_APPROVED
from fedemb.errors import (
    BudgetExceeded,
    FedEmbError,
    LedgerError,
    PlanMismatch,
    Refused,
    SignatureInvalid,
)
from fedemb.keys.trust import TrustStore, key_id_of
from fedemb.ledger.budget import Charge, Spent, in_series, spent
from fedemb.ledger.records import Record
from fedemb.ledger.terms import ChargedContent, PolicyTerms

ROUND_LOG_SCHEMA = "fedemb/round_log/1"
_ROUND_LOG = {"schema", "run_id", "attempt", "rounds_started", "sha", "card_sha", "signature"}


@dataclass
class Attempt:
    """One reservation and its outcome."""

    reserve: Record
    bind: Record | None = None
    commit: Record | None = None
    void: Record | None = None
    releases: list[Record] = field(default_factory=list[Record])
    _weights: dict[int, Charge] = field(default_factory=dict[int, Charge])

    @property
    def status(self) -> str:
        """`reserved`, `bound`, `committed`, `void` or `released`."""
        if self.releases:
            return "released"
        if self.void:
            return "void"
        if self.commit:
            return "committed"
        return "bound" if self.bind else "reserved"

    @property
    def reserved(self) -> ReserveRecord:
        """Content of the reservation."""
        return self.reserve.content(ReserveRecord)

    @property
    def charged(self) -> bool:
        """Whether the attempt is charged; simulations and void attempts are not."""
        return self.charged_at(math.inf)

    def charged_at(self, sequence: float) -> bool:
        """Returns whether the attempt is charged as of a ledger record."""
        void = self.void is not None and self.void.sequence <= sequence
        return self.reserved.purpose == "release" and not void

    @property
    def charge(self) -> Charge:
        """The charge: rounds as reserved, or rounds started once committed."""
        rounds = self.reserved.rounds
        charged = self.commit.content(CommitRecord).rounds_started if self.commit else rounds
        if charged not in self._weights:
            self._weights[charged] = Charge(
                event=self.reserve.event,
                relation=self.reserved.relation,
                rounds=rounds,
                rounds_charged=charged,
            )
        return self._weights[charged]


@dataclass
class LedgerState:
    """The replayed ledger of one policy."""

    terms: PolicyTerms | None = None
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict[tuple[str, int], Attempt])
    external: list[Record] = field(default_factory=list[Record])
    """Declared losses of releases made elsewhere."""
    rotations: list[Record] = field(default_factory=list[Record])
    approvers: dict[str, str] = field(default_factory=dict[str, str])
    """Public key -> name of each current approver."""
    decisions: list[Record] = field(default_factory=list[Record])
    """Approvals and waivers of people."""
    evaluations: list[Record] = field(default_factory=list[Record])
    """One record per evaluation on held-out users."""
    by_block: dict[str, list[Attempt]] = field(default_factory=dict[str, list[Attempt]])
    replayed: int = 0
    _external: dict[int, Charge] = field(default_factory=dict[int, Charge])
    """Number of the record of an external charge -> its charge."""
    _by_sequence: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    _last_attempt: dict[str, int] = field(default_factory=dict[str, int])

    def replay(self, records: Iterable[Record], trust: TrustStore | None) -> None:
        """Applies further records.

        Args:
          records: the next records, in order.
          trust: keys that verify the trainer's signature of round logs; None: verified before.

        Raises:
          LedgerError: a record breaks a rule.
          SignatureInvalid: a round log is not signed by a trainer.
        """
        for record in records:
            if (record.sequence == 0) != (record.kind == "policy"):
                _broken(
                    record, "the first record must be the policy, and no other record may be one"
                )
            getattr(self, f"_on_{record.kind}")(record, trust)
            self.replayed += 1

    def last_attempt(self, run_id: str) -> int:
        """Returns the number of the run's latest attempt, 0 if none."""
        return self._last_attempt.get(run_id, 0)

    def committed_runs(self, *, before: float = math.inf) -> set[str]:
        """Returns the ids of the charged runs that were committed before a ledger record."""
        return {
            attempt.reserve.run_id
            for attempt in self.attempts.values()
            if attempt.charged and attempt.commit and attempt.commit.sequence < before
        }

    def simulations(self, *, before: float = math.inf) -> set[str]:
        """Returns the ids of the simulations that were reserved before a ledger record."""
        return {
            attempt.reserve.run_id
            for attempt in self.attempts.values()
            if attempt.reserved.purpose == "simulation"
            and attempt.reserve.sequence < before
            and not attempt.void
        }

    def approvals_of(
        self, model_sha: str, report_sha: str, until: datetime | None = None
    ) -> list[Record]:
        """Returns the approvals of one model with one report: the first approval of each person.

        Approvals recorded after `until` do not count; None: all count.

        A person with a new key counts as the same person, and so does a key under a new name.
        """
        found: list[Record] = []
        seen: set[str] = set()
        for record in self.decisions:
            who = {record.actor, record.signature["key_id"]}
            decision = record.content(DecisionRecord)
            asked = (decision.model_sha, decision.report_sha)
            in_time = until is None or datetime.fromisoformat(record.time) <= until
            if asked == (model_sha, report_sha) and in_time:
                if not who & seen:
                    found.append(record)
                seen |= who
        return found

    def waivers_of(self, model_sha: str, last: float = math.inf) -> dict[str, Record]:
        """Returns the waivers of one model up to a ledger record: code -> first record."""
        found: dict[str, Record] = {}
        for record in self.decisions:
            decision = record.content(DecisionRecord)
            waiver = decision.report_sha is None and decision.model_sha == model_sha
            if waiver and record.sequence <= last:
                found.setdefault(decision.code, record)
        return found

    def charges(self, block: str, *, without: Attempt | None = None) -> list[Charge]:
        """Returns the charges of a block: those of runs, except one attempt, then external ones."""
        runs = [
            item.charge
            for item in self.by_block.get(block, [])
            if item.charged and item is not without
        ]
        declared = ((record, record.content(ChargeRecord).blocks) for record in self.external)
        external = [
            self._external[record.sequence]
            for record, blocks in declared
            if not blocks or block in blocks
        ]
        return [*runs, *external]

    def spent(self, block: str, more: Iterable[Charge] = ()) -> Spent:
        """Returns the cumulative privacy loss of a block, with further charges if given."""
        if self.terms is None:
            raise LedgerError("the ledger is empty; make one with `fedemb ledger init`")
        return spent(self.terms, [*self.charges(block), *more])

    def spent_by_runs(self, block: str) -> Spent:
        """Returns the cumulative privacy loss of a block without external charges."""
        if self.terms is None:
            raise LedgerError("The ledger is empty. Create it with `fedemb ledger init`.")
        return spent(self.terms, [item for item in self.charges(block) if not item.external])

    def worst_block(self, blocks: Collection[str] = ()) -> str | None:
        """Returns the block with the highest cumulative epsilon, among the given blocks or all."""
        names = [block for block in self.by_block if not blocks or block in blocks]
        return max(names, key=lambda block: self.spent(block).epsilon, default=None)

    def _on_policy(self, record: Record, trust: TrustStore | None) -> None:
        self.terms = PolicyTerms.from_json(record.content(PolicyRecord).terms)

    def _on_charge(self, record: Record, trust: TrustStore | None) -> None:
        from fedemb.ledger.budget import external_charge

        if self.terms is None or record.run_id:
            _broken(record, "an external charge belongs to a policy and to no run")
        declared = record.content(ChargeRecord)
        if any(declared.name == other.body["name"] for other in self.external):
            _broken(record, "the name of an external charge is unique")
        try:
            self._external[record.sequence] = external_charge(self.terms, declared)
        except FedEmbError as error:
            _broken(record, f"the policy does not admit the external charge ({error})")
        self.external.append(record)
        for block in declared.blocks:
            self.by_block.setdefault(block, [])

    def _on_keys(self, record: Record, trust: TrustStore | None) -> None:
        self.rotations.append(record)  # what they mean for the records after them: ledger_chain

    def _on_approvers(self, record: Record, trust: TrustStore | None) -> None:
        self.approvers = {
            key: name for name, key in record.content(ApproversRecord).approvers.items()
        }

    def _on_decision(self, record: Record, trust: TrustStore | None) -> None:
        attempt = self._attempt_of(record)
        if not attempt.commit or attempt.reserved.purpose != "release":
            _broken(record, "people decide only about a committed run with purpose release")
        names = {key_id_of(key): name for key, name in self.approvers.items()}
        body = record.content(DecisionRecord)
        approval = body.report_sha is not None
        if approval != (body.code == NOT_APPROVED):
            _broken(record, "an approval, and only an approval, names its report")
        if approval and names.get(record.signature.get("key_id", "")) != record.actor:
            _broken(record, "it does not bear the name its key was given")
        self.decisions.append(record)

    def _on_reserve(self, record: Record, trust: TrustStore | None) -> None:
        body, key = record.content(ReserveRecord), (record.run_id, record.attempt)
        if not record.run_id or record.attempt != self.last_attempt(record.run_id) + 1:
            _broken(record, "attempts of a run are numbered from 1 without gaps")
        if not set(body.blocks) <= set(body.blocks_requested) or body.rounds < 1:
            _broken(record, "it charges blocks that were not requested, or no rounds")
        if self.terms is None or body.delta != self.terms.delta:
            _broken(record, "its delta is not the policy's")
        if not self.terms.users.cut(body.blocks_requested):
            _broken(record, "it cuts the users into other blocks than the policy does for life")
        attempt = Attempt(record)
        self.attempts[key] = self._by_sequence[record.sequence] = attempt
        self._last_attempt[record.run_id] = record.attempt
        for block in body.blocks:
            self.by_block.setdefault(block, []).append(attempt)

    def _on_bind(self, record: Record, trust: TrustStore | None) -> None:
        attempt = self._attempt_of(record)
        if attempt.bind or attempt.commit or attempt.void:
            _broken(record, "an attempt is bound once, before it is committed or void")
        attempt.bind = record

    def _on_commit(self, record: Record, trust: TrustStore | None) -> None:
        attempt = self._attempt_of(record)
        body = record.content(CommitRecord)
        started, log = body.rounds_started, body.round_log
        if not attempt.bind or attempt.commit:
            _broken(record, "an attempt is committed once, after it was bound")
        if started > attempt.reserved.rounds:
            _broken(record, "it commits more rounds than were reserved")
        expected = (ROUND_LOG_SCHEMA, record.run_id, record.attempt, started)
        if set(log) != _ROUND_LOG or expected != tuple(
            log[name] for name in ("schema", "run_id", "attempt", "rounds_started")
        ):
            _broken(record, "its round log is not that of this attempt")
        if trust is not None:
            signed = {name: value for name, value in log.items() if name != "signature"}
            try:
                sequence, signature = record.sequence, log["signature"]
                trust.verify(signed, signature, "trainer", "its round log", at=sequence)
            except SignatureInvalid as error:
                raise SignatureInvalid(
                    f"ledger record {record.name}: {error}; restore the ledger from its backup"
                ) from error
        attempt.commit = record

    def _on_void(self, record: Record, trust: TrustStore | None) -> None:
        attempt = self._attempt_of(record)
        if attempt.bind or attempt.commit or attempt.void:
            _broken(record, "only an attempt that was never bound can be void")
        attempt.void = record

    def _on_release(self, record: Record, trust: TrustStore | None) -> None:
        attempt = self._attempt_of(record)
        if not attempt.commit or attempt.reserved.purpose != "release":
            _broken(record, "only a committed run with purpose release is released")
        attempt.releases.append(record)

    def _on_evaluation(self, record: Record, trust: TrustStore | None) -> None:
        if not self._attempt_of(record).commit:
            _broken(record, "only a committed model is measured")
        self.evaluations.append(record)

    def _attempt_of(self, record: Record) -> Attempt:
        attempt = self._by_sequence.get(record.content(AttemptRecord).reservation)
        if attempt is None or (record.run_id, record.attempt) != (
            attempt.reserve.run_id,
            attempt.reserve.attempt,
        ):
            _broken(record, "the reservation it names is not one of its run and attempt")
        return attempt


def _broken(record: Record, rule: str) -> NoReturn:
    raise LedgerError(
        f"ledger record {record.name} ({record.kind}) breaks a rule: {rule}; it was not written by "
        "this package, restore the ledger from its backup"
    )


def _unfinished_series(
    state: LedgerState, policy_id: str, blocks: list[str], runs: int
) -> list[str]:
    """Returns the blocks with fewer charges than the planned runs.

    Raises:
      BudgetExceeded: every block has all of them.
    """
    blocks = [block for block in blocks if len(state.charges(block)) < runs]
    if not blocks:
        raise BudgetExceeded(
            f"all planned runs ({runs}) of policy {policy_id!r} took place, and rounds that were "
            "not used cannot be spent. Start a new policy.policy_id, set policy.planned_runs to "
            "all of its runs, and add up the epsilons of both policies"
        )
    return blocks


def admit(state: LedgerState, policy_id: str, run_id: str, content: ChargedContent) -> list[str]:
    """Returns the requested blocks with enough remaining budget for the run; full blocks drop out.

    A simulation is recorded but not charged, because its model can never be released.

    Args:
      state: current state of the ledger.
      policy_id: policy id, used in error messages.
      run_id: id of the requesting run.
      content: content that the reservation binds.

    Raises:
      BudgetExceeded: no requested block has enough remaining budget.
      PlanMismatch: the policy accepts only runs of its planned series, and this run is not part of
          it, or the series is complete.
      Refused: the run partitions users into blocks differently from earlier runs.
      UnsupportedAccounting: no accountant is valid for the event.
    """
    blocks = list(content["blocks_requested"])
    terms = state.terms
    if terms is None:
        raise LedgerError(f"policy {policy_id!r} has no ledger; make it with `fedemb ledger init`")
    if content["delta"] != terms.delta:
        raise PlanMismatch(
            f"run {run_id!r} has delta={content['delta']:g}, but policy {policy_id!r} is fixed at "
            f"{terms.delta:g}; set policy.delta to that value"
        )
    if not terms.users.cut(blocks):
        raise Refused(
            f"user block {blocks[0]!r} of run {run_id!r} is not a block of policy {policy_id!r}, "
            f"which divides {terms.users.cohort_column or 'one cohort'} into "
            f"{terms.users.blocks_per_cohort} buckets for its lifetime. Restore "
            "partition.blocks_per_cohort and the cohort column"
        )
    if content["purpose"] == "simulation":
        return blocks
    charge = Charge.planned(content)
    if terms.series is not None:
        if not in_series(terms, charge):
            raise PlanMismatch(
                f"run {run_id!r} is not of the series that policy {policy_id!r} planned (another "
                "mechanism, rounds or noise); run the planned configuration, or start a policy "
                "with composition: renyi"
            )
        blocks = _unfinished_series(state, policy_id, blocks, terms.series.runs)
    after_charge = {block: state.spent(block, [charge]) for block in blocks}
    # Written so that NaN excludes a block.
    paying = [block for block in blocks if after_charge[block].epsilon <= terms.epsilon_cap]
    if not paying:
        block = min(blocks, key=lambda name: after_charge[name].epsilon)
        before, after = state.spent(block), after_charge[block]
        series = after.method == "planned_series"
        raise BudgetExceeded(
            f"run {run_id!r} would raise block {block!r} from epsilon={before.epsilon:.4g} to "
            f"{after.epsilon:.4g} at delta={terms.delta:g} "
            f"({'as a planned series' if series else 'by the Rényi filter'}), above the cap "
            f"{terms.epsilon_cap:g} of policy {policy_id!r}; {_remedy(terms)}"
        )
    return paying


def _remedy(terms: PolicyTerms) -> str:
    if terms.series is not None:
        return (
            "no more runs of its series fit: use users of other blocks, or start another "
            "policy_id, with more noise or fewer rounds, and add up the epsilons of both"
        )
    return "raise noise_multiplier, lower rounds, or use users of other blocks"
