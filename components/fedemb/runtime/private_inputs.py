"""Opens private users for a step, only after they match the commitment in the ledger.

The `bind` record of a run contains keyed commitments to `users/` and `evaluation/`. The private
root, the manifest of the users and the files may be replaced; the record cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fedemb.data.client_data import FolderCommitment, VerifiedFolder, verified_copy
from fedemb.documents.ledger_record import BindRecord
from fedemb.errors import Refused
from fedemb.foundation.canonical_json import tree_digest
from fedemb.keys import commit_to_users, commitment_key
from fedemb.ledger.state import Attempt
from fedemb.runtime.step_context import StepContext
from fedemb.storage import local_tree, open_store

PrivateFolder = Literal["users", "evaluation"]
"""Private folders with a commitment in the ledger."""


@contextmanager
def open_private(
    context: StepContext, people: PrivateFolder, *, attempt: int | None = None
) -> Iterator[VerifiedFolder]:
    """Opens a private folder of a bound run for reading.

    Args:
      context: context of the step; its key store holds the policy's key.
      people: folder to open.
      attempt: attempt of the run; None selects the latest.

    Yields:
      A copy of the folder whose bytes were compared with the commitment.

    Raises:
      Refused: the ledger has no bind record of the run, or no commitment to this folder.
      PlanMismatch: the folder does not match the commitment.
      StorageError: the folder is missing, or cannot be read or copied.
    """
    commitment = _commitment(context, people, attempt)
    with (
        local_tree(context.private(people)) as folder,
        verified_copy(folder, commitment) as verified,
    ):
        yield verified


def commitment_to(context: StepContext, people: PrivateFolder, attempt: int) -> str | None:
    """Computes the commitment to a private folder as it is now; None if incomplete."""
    if not open_store(context.private(people)).exists("manifest.json"):
        return None
    key = commitment_key(context.keys, context.config.policy.policy_id)
    with local_tree(context.private(people)) as folder:
        return commit_to_users(key, context.run_id, attempt, tree_digest(folder))


def _commitment(
    context: StepContext, people: PrivateFolder, number: int | None
) -> FolderCommitment:
    ledger, run_id = context.ledger, context.run_id
    if number is None:
        number = ledger.state.last_attempt(run_id)
    attempt: Attempt | None = ledger.state.attempts.get((run_id, number))
    bind = attempt and attempt.bind
    value = bind and bind.content(BindRecord).commitments.get(people)
    if not value:
        raise Refused(
            f"The ledger of policy {ledger.policy_id!r} has no commitment to {people}/ of run "
            f"{run_id!r}, so its content cannot be checked. Run the training step first."
        )
    key = commitment_key(context.keys, context.config.policy.policy_id)
    return FolderCommitment(run_id, number, value, key)
