"""Reports of a run as their steps signed them: what else lies in its public folder is not shown."""

from __future__ import annotations

from typing import Any

from fedemb.documents.document import Written, read
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility, utility_kind
from fedemb.errors import ArtifactError
from fedemb.ledger import Ledger, open_ledger, read_trust
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.storage import open_store


def ledger_of(run: RunDirectory) -> Ledger:
    """The ledger a run was reserved in.

    Raises:
      LedgerError: it is missing or broken.
    """
    store = open_store(run.stores()["ledger"])
    return open_ledger(store.uri, run.config().policy.policy_id, trust=read_trust(store))


def signed_report(run: RunDirectory) -> Written[PrivacyReport] | None:
    """The newest privacy report of a run; None if it has none yet.

    Raises:
      ArtifactError: it is none, or of another run.
      SignatureInvalid: account_privacy did not sign it.
      LedgerError: the ledger that says whose keys count is missing or broken.
    """
    path = run.output("privacy_report")
    if path is None:
        return None
    report = read(path, PrivacyReport)
    _check(run, report, report.body.run_id, report.body.cumulative.ledger_sequence)
    return report


def signed_utility(run: RunDirectory) -> AnyUtility | None:
    """The newest utility report of a run, signed by its evaluation; else as `signed_report`."""
    path = run.output("utility_report")
    if path is None:
        return None
    report = read(path, utility_kind(run.config().task))
    _check(run, report, report.body.run_id)
    return report.body


def _check(run: RunDirectory, document: Written[Any], run_id: str, at: int | None = None) -> None:
    """`at`: ledger record at which the key counted; None: that of the run's reservation."""
    ledger = ledger_of(run)
    if at is None:
        key = (run.run_id, ledger.state.last_attempt(run.run_id))
        at = ledger.state.attempts[key].reserve.sequence if key in ledger.state.attempts else None
    ledger.chain.trust.check(document, at=at)
    if run_id != run.run_id:
        raise ArtifactError(
            f"the newest {document.body.kind} of run {run.run_id} is of another run; find out who "
            "may write to its public folder"
        )
