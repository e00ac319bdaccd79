"""A run directory as MLflow shows it. Only documents with a valid signature are read."""

from __future__ import annotations

from datetime import datetime

from fedemb.pipelines.run.compare import compared_run
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.report_pages import PAGES
from fedemb.pipelines.run.signed import (
    readable,
    signed_audit,
    signed_plan_document,
    signed_report,
    signed_utility,
    signed_verdict,
)
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
    shown = compared_run(run)
    time = shown.report.time if shown.report else None
    documents = dict(_documents(run))
    return tracked_run(
        RunContent(
            shown=shown,
            config=run.config(),
            documents=documents,
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
