"""Documents of a run that its steps signed; other files in its public folder are not shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
        from fedemb.steps.plan_privacy.plan import document

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
    _check_signature(run, plan)
    return plan


def signed_report(run: RunDirectory) -> Written[PrivacyReport] | None:
    """The newest privacy report of a run; None if it has none yet.

    Raises:
      ArtifactError: the file is not a privacy report, or one of another run.
      SignatureInvalid: account_privacy did not sign it.
      LedgerError: the ledger that says whose keys count is missing or broken.
    """
    path = _written(run, "privacy_report")
    if path is None:
        return None
    report = read(path, PrivacyReport)
    _check_signature(run, report, report.body.cumulative.ledger_sequence)
    return _of_this_run(run, report)


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
    path = _written(run, "verdict")
    try:
        report = signed_report(run)
        if path is None or report is None:
            return None
        verdict = read(path, VerdictDocument)
        if verdict.body.report_sha != report.sha:
            return None
        _check_signature(run, verdict, report.body.cumulative.ledger_sequence)
    except FedEmbError:
        return None
    return verdict


def _signed(run: RunDirectory, output: str, kind: type[D]) -> Written[D] | None:
    path = _written(run, output)
    if path is None:
        return None
    document, report = read(path, kind), signed_report(run)
    known = report and report.body.cumulative.ledger_sequence
    _check_signature(run, document, ledger_of(run).head.sequence if known is None else known)
    return _of_this_run(run, document)


def _written(run: RunDirectory, output: str) -> Path | None:
    """The newest file of an output; an empty one is that of a step that ended before it wrote."""
    path = run.output(output)
    return path if path is not None and path.is_file() and path.stat().st_size else None


def _check_signature(run: RunDirectory, document: Written[D], at: int | None = None) -> None:
    """`at`: ledger record at which the key counted; None: that of the run's reservation."""
    ledger = ledger_of(run)
    if at is None:
        key = (run.run_id, ledger.state.last_attempt(run.run_id))
        at = ledger.state.attempts[key].reserve.sequence if key in ledger.state.attempts else None
    ledger.chain.trust.check(document, at=at)


def _of_this_run(run: RunDirectory, document: Written[D]) -> Written[D]:
    if getattr(document.body, "run_id", None) != run.run_id:
        raise ArtifactError(
            f"The newest {document.body.kind} in the folder of run {run.run_id} belongs to "
            "another run. Check who may write to the public folder."
        )
    return document
