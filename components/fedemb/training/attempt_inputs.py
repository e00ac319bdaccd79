"""The signed inputs of an attempt, verified against the plan, the ledger and each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.model import UsersManifest
from fedemb.documents.plan import read_plan
from fedemb.errors import PlanMismatch
from fedemb.foundation.canonical_json import json_digest
from fedemb.ledger import Reservation
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.runtime.inputs import read_reserved, read_start, read_users
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.step_context import StepContext


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
            initial_weights_sha=read_start(context).weights_sha,
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
