"""Documents of a run that its steps signed; other files in its public folder are not shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedemb.config import RunConfig
from fedemb.documents.audit import AuditReport
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.plan_document import read_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility, utility_kind
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError, FedEmbError
from fedemb.foundation.document import Document, Written, read
from fedemb.ledger import Ledger, open_ledger, read_trust
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.storage import open_store

D = TypeVar("D", bound=Document)
T = TypeVar("T")


def readable(read: Callable[[], T]) -> T | None:
    """Returns a document, or None if it is missing, broken or not signed as it must be."""
    try:
        return read()
    except FedEmbError:
        return None


def ledger_of(run: RunDirectory, config: RunConfig | None = None) -> Ledger:
    """The ledger a run was reserved in, or the one that another configuration names.

    Raises:
      LedgerError: it is missing or broken.
    """
    store = open_store(run.stores(config)["ledger"])
    return open_ledger(store.uri, run.config().policy.policy_id, trust=read_trust(store))


def signed_plan(run: RunDirectory) -> PrivacyPlan | None:
    """The newest plan of a run; None if it has none yet.

    Until something is reserved in a ledger of the run's own, no key counts yet: it is then made of
    the configuration again.

    Raises:
      ArtifactError: the file is not a plan.
      PlanMismatch: it is that of another configuration.
      SignatureInvalid: plan_privacy did not sign it.
      LedgerError: the ledger that says whose keys count is missing or broken.
    """
    if run.output("privacy_plan") is None:
        return None
    plan = signed_plan_document(run)
    if plan is None:
        from fedemb.gate.plan import document

        return document(run.config())
    return plan.body


def signed_plan_document(run: RunDirectory) -> Written[PrivacyPlan] | None:
    """The newest plan of a run; None: no plan, or no ledger that says whose keys count.

    Raises:
      ArtifactError: as `signed_plan`, like the other errors.
    """
    path = run.output("privacy_plan")
    if path is None or not open_store(run.stores()["ledger"]).exists("trust.json"):
        return None
    _, plan = read_plan(path, run.config())
    ledger = ledger_of(run)
    key = (run.run_id, ledger.state.last_attempt(run.run_id))
    at = ledger.state.attempts[key].reserve.sequence if key in ledger.state.attempts else None
    ledger.chain.trust.check(plan, at=at)
    return plan


def signed_report(run: RunDirectory) -> Written[PrivacyReport] | None:
    """The newest privacy report of a run; None if it has none yet.

    Raises:
      ArtifactError: the file is not a privacy report, or one of another run.
      SignatureInvalid: account_privacy did not sign it.
      LedgerError: the ledger that says whose keys count is missing or broken.
    """
    return _signed(run, "privacy_report", PrivacyReport)


def signed_audit(run: RunDirectory) -> Written[AuditReport] | None:
    """The newest audit report of a run, signed by its audit; else as `signed_report`."""
    return _signed(run, "audit_report", AuditReport)


def signed_utility(run: RunDirectory) -> Written[AnyUtility] | None:
    """The newest utility report of a run, signed by its evaluation; else as `signed_report`."""
    return _signed(run, "utility_report", utility_kind(run.config().task))


def signed_verdict(run: RunDirectory) -> Written[VerdictDocument] | None:
    """The newest verdict on the privacy report of a run, signed by its gate.

    None: no verdict, one about an earlier report, or one whose signature cannot be checked. A
    verdict that is not shown only makes a run look less finished.
    """
    verdict = readable(lambda: _signed(run, "verdict", VerdictDocument))
    report = readable(lambda: signed_report(run))
    if verdict is None or report is None or verdict.body.report_sha != report.sha:
        return None
    return verdict


def _signed(run: RunDirectory, output: str, kind: type[D]) -> Written[D] | None:
    """The newest document of a run; an empty file is that of a step that ended before it wrote.

    The key counted when the privacy report was made; now, if no report exists.
    """
    path = run.output(output)
    if path is None or not path.is_file() or not path.stat().st_size:
        return None
    document = read(path, kind)
    report = document if isinstance(document.body, PrivacyReport) else signed_report(run)
    body = report and report.body
    known = body.cumulative.ledger_sequence if isinstance(body, PrivacyReport) else None
    ledger = ledger_of(run)
    ledger.chain.trust.check(document, at=ledger.head.sequence if known is None else known)
    if getattr(document.body, "run_id", run.run_id) != run.run_id:
        raise ArtifactError(
            f"The newest {document.body.kind} in the folder of run {run.run_id} belongs to "
            "another run. Check who may write to the public folder."
        )
    return document
