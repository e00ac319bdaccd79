"""Sends an ended run to MLflow: public values only. A failure is one line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime

from fedemb.errors import FedEmbError
from fedemb.reports.headline import Headline
from fedemb.reports.mlflow.log import log_in_time
from fedemb.reports.mlflow.tracked import PublicDocument, RunContent, tracked_run
from fedemb.steps.show_outcome.papers import Output, RunPapers
from fedemb.steps.show_outcome.started import Started

_LOG = logging.getLogger(__name__)
_PAGES = {
    "privacy_report": "privacy_page",
    "utility_report": "utility_page",
    "audit_report": "audit_page",
}
"""Document -> output that is its page in HTML."""


def track(
    found: Headline,
    page: bytes,
    pages: Mapping[str, Output],
    papers: RunPapers,
    started: Started,
) -> None:
    """Writes the run to MLflow, if the run has an address of a tracking server.

    This step has no key and no ledger, so no signature is checked; a tag of the run says so.
    """
    if not started.mlflow:
        return
    if not started.mlflow.startswith(("http://", "https://", "mlflow+http")):
        _LOG.warning("mlflow: not written: the address is not an http or https URL")
        return
    if started.config is None:
        _LOG.warning("mlflow: not written: the parameters are not a valid configuration")
        return
    try:
        content = _content(found, page, pages, papers, started)
    except FedEmbError as error:
        _LOG.warning("mlflow: not written: %s", error)
        return
    if problem := log_in_time(tracked_run(content), started.mlflow):
        _LOG.warning("mlflow: not written: %s", problem)


def _content(
    found: Headline,
    page: bytes,
    pages: Mapping[str, Output],
    papers: RunPapers,
    started: Started,
) -> RunContent:
    assert started.config is not None  # of the caller
    documents: dict[str, PublicDocument | None] = {
        "privacy_report": papers.report,
        "utility_report": papers.utility,
        "audit_report": papers.audit,
        "verdict": papers.verdict,
        "privacy_plan": papers.plan,
    }
    report = papers.report and papers.report.body
    html = {name: pages[output].read() for name, output in _PAGES.items() if output in pages}
    return RunContent(
        name=started.run_id,
        headline=found,
        config=started.config,
        report=report,
        utility=papers.utility and papers.utility.body,
        documents={name: item for name, item in documents.items() if item is not None},
        pages={**html, "outcome": page},
        signatures="not checked",
        end=datetime.fromisoformat(report.time).timestamp() if report else time.time(),
    )
