"""A run directory as MLflow shows it. Only documents with a valid signature are read."""

from __future__ import annotations

from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import run_headline
from fedemb.pipelines.run.report_pages import PAGES
from fedemb.pipelines.run.signed import (
    readable,
    signed_audit,
    signed_plan_document,
    signed_report,
    signed_utility,
    signed_verdict,
)
from fedemb.reports.mlflow import TrackedRun


def tracked_run(run: RunDirectory) -> TrackedRun:
    """Returns the public content of a run.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
    """
    report = readable(lambda: signed_report(run))
    utility = readable(lambda: signed_utility(run))
    documents = {
        "privacy_report": report,
        "utility_report": utility,
        "audit_report": readable(lambda: signed_audit(run)),
        "verdict": readable(lambda: signed_verdict(run)),
        "privacy_plan": readable(lambda: signed_plan_document(run)),
    }
    kept = {name: item for name, item in documents.items() if item is not None}
    pages = {name: run.reports / f"{name}.html" for name in PAGES if name in kept}
    return TrackedRun(
        name=run.run_id,
        headline=run_headline(run),
        config=run.config(),
        report=report and report.body,
        utility=utility and utility.body,
        artifacts={
            **{f"{name}.json": item.data for name, item in kept.items()},
            **{path.name: path.read_bytes() for path in pages.values() if path.is_file()},
        },
        seconds=run.read_state().seconds,
        signatures="checked",
    )
