"""The first page of a run in Kubeflow, also after a failed step.

Kubeflow shows only exit code 1, and no output of a failed step. This step runs at the end
regardless of the run's outcome, and collects the outputs of the other steps in the public root. It
reads no ledger and has no key, so it verifies nothing, and no decision depends on it. The gate has
decided, and `fedemb verify` verifies a release.
"""

from __future__ import annotations

import logging

from fedemb.errors import FedEmbError
from fedemb.foundation.files import write_bytes
from fedemb.reports.figures import privacy_figures, utility_figures
from fedemb.reports.headline import Failure, Headline, RunFacts, headline
from fedemb.reports.lineage import StepLineage, read_steps
from fedemb.reports.mlflow import TrackedRun, log_in_time
from fedemb.runtime.outcome import outcomes, run_folder
from fedemb.runtime.step import declared
from fedemb.runtime.step_context import StepContext
from fedemb.steps.show_outcome.page import PAGES, Shown, outcome_page, summary
from fedemb.steps.show_outcome.papers import RunPapers, outputs_of, read_papers
from fedemb.steps.show_outcome.started import Started

_LOG = logging.getLogger(__name__)
_COMPLETED = {"COMPLETE": True, "SUCCEEDED": True, "FAILED": False, "ERROR": False}
"""State of the run in ML Metadata and in KFP -> whether all steps succeeded."""


def run(context: StepContext, started: Started, *, uri: str, state: str) -> dict[str, float]:
    """Writes the pages `outcome` and `summary`, and a copy of the `verdict`.

    The other outputs of the run are beside `uri`, the address of `outcome`.
    Then it writes the run to MLflow, if an address is set; that cannot fail the step.

    Returns: Metrics for the comparison of runs; only those that the run has.

    Raises:
      StorageError: the public root cannot be read.
    """
    folder = run_folder(uri, "show-outcome")
    outputs = outputs_of(folder, started.reused)
    papers = read_papers(outputs)
    failed = sorted(outcomes(folder, _files), key=lambda item: str(item["step"]))
    facts = RunFacts(
        verdict=papers.verdict and papers.verdict.body,
        report=papers.report and papers.report.body,
        utility=papers.utility and papers.utility.body,
        released=papers.release is not None,
        failures=[
            Failure(str(item["step"]), int(item["exit_code"]), str(item.get("error", "")))
            for item in failed
        ],
        completed=_COMPLETED.get(state),
    )
    found = headline(facts)
    addresses = {output.name: output.uri for output in outputs if output.name in PAGES}
    shown = Shown(folder, found, facts, failed, papers.release, addresses, _lineage(folder))
    page = outcome_page(shown).encode()
    write_bytes(context.artifacts.outcome, page)
    write_bytes(context.artifacts.summary, summary(shown).encode())
    write_bytes(context.artifacts.verdict, papers.verdict.data if papers.verdict else b"{}")
    _track(found, page, papers, started)
    code = {} if found.exit_code is None else {"exit_code": float(found.exit_code)}
    return {**code, **_figures(papers)}


def _track(found: Headline, page: bytes, papers: RunPapers, started: Started) -> None:
    """Writes the run to MLflow, if it has an address; a failure is one line in the log.

    This step has no key and no ledger, so no signature is checked; a tag of the run says so.
    """
    if not started.mlflow:
        return
    if started.config is None:
        _LOG.warning("mlflow: not written: the parameters are not a valid configuration")
        return
    documents = {
        "privacy_report": papers.report,
        "utility_report": papers.utility,
        "audit_report": papers.audit,
        "verdict": papers.verdict,
        "privacy_plan": papers.plan,
    }
    files = {f"{name}.json": item.data for name, item in documents.items() if item is not None}
    run = TrackedRun(
        name=started.run_id,
        headline=found,
        config=started.config,
        report=papers.report and papers.report.body,
        utility=papers.utility and papers.utility.body,
        artifacts={**files, "outcome.html": page},
        signatures="not checked",
    )
    if problem := log_in_time(run, started.mlflow):
        _LOG.warning("mlflow: not written: %s", problem)


def _figures(papers: RunPapers) -> dict[str, float]:
    """Returns privacy, utility and verdict of a run as numbers, as far as available."""
    found: dict[str, float] = {}
    if papers.verdict:
        found["allowed"] = float(papers.verdict.body.allow)
    if papers.report:
        found |= privacy_figures(papers.report.body)
    if papers.utility:
        found |= utility_figures(papers.utility.body)
    return found


def _files(name: str) -> tuple[str, ...]:
    """Returns the file outputs of a step; empty for a step unknown to this version."""
    try:
        return declared(name).files
    except ModuleNotFoundError:
        return ()


def _lineage(folder: str) -> list[StepLineage]:
    """Returns the steps of the run with their inputs and outputs; empty without a lineage file."""
    try:
        return read_steps(folder)
    except FedEmbError:
        return []
