"""A run directory as MLflow shows it. Only documents with a valid signature are read."""

from __future__ import annotations

from datetime import datetime

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
from fedemb.pipelines.steps import pipeline_of
from fedemb.reports.mlflow.log import log
from fedemb.reports.mlflow.tracked import PublicDocument, RunContent, TrackedRun, tracked_run


def log_run(run: RunDirectory, address: str) -> str:
    """Writes a run to MLflow and returns a sentence about where it is now.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
      InputError: the address is not supported.
      StorageError: folder or server cannot be written.
    """
    return log(tracked(run), address)


def tracked(run: RunDirectory) -> TrackedRun:
    """Returns the public content of a run.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
    """
    report = readable(lambda: signed_report(run))
    utility = readable(lambda: signed_utility(run))
    config, took = run.config(), run.read_state().seconds
    time = report.body.time if report else None
    return tracked_run(
        RunContent(
            name=run.run_id,
            headline=run_headline(run),
            config=config,
            report=report and report.body,
            utility=utility and utility.body,
            seconds={name: took[name] for name in pipeline_of(config).steps if name in took},
            documents=_documents(run),
            pages={
                name: path.read_bytes()
                for name in PAGES
                if (path := run.reports / f"{name}.html").is_file()
            },
            signatures="checked",
            end=datetime.fromisoformat(time).timestamp() if time else _written(run),
        )
    )


def _written(run: RunDirectory) -> float:
    """Time at which the state of the run was written last."""
    state = run.root / "state.json"
    return (state if state.exists() else run.root / "config.yaml").stat().st_mtime


def _documents(run: RunDirectory) -> dict[str, PublicDocument]:
    found: dict[str, PublicDocument | None] = {
        "privacy_report": readable(lambda: signed_report(run)),
        "utility_report": readable(lambda: signed_utility(run)),
        "audit_report": readable(lambda: signed_audit(run)),
        "verdict": signed_verdict(run),
        "privacy_plan": readable(lambda: signed_plan_document(run)),
    }
    return {name: document for name, document in found.items() if document is not None}
