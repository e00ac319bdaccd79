"""The first page of a run in Kubeflow, also after a failed step.

Kubeflow shows only exit code 1, and no output of a failed step. This step runs at the end
regardless of the run's outcome, and collects the outputs of the other steps in the public root. It
reads no ledger and has no key, so it verifies nothing, and no decision depends on it. The gate has
decided, and `fedemb verify` verifies a release.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kfp import dsl

from fedemb.config import RunConfig
from fedemb.config.parameters import OPTIONAL_STORES, run_config
from fedemb.documents.artifacts import Public
from fedemb.documents.audit import AuditReport
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility, ClassifierReport, UtilityReport
from fedemb.documents.verdict import ReleaseManifest, VerdictDocument
from fedemb.errors import ArtifactError, ConfigError, InputError, StorageError
from fedemb.foundation.document import Document, Written, parse
from fedemb.foundation.files import write_bytes
from fedemb.reports.headline import Documents, Failure, Headline, RunFacts, headline
from fedemb.reports.mlflow import TrackedRun, log_in_time
from fedemb.reports.pages import run_page
from fedemb.reports.report import render
from fedemb.runtime.step import declared, step
from fedemb.runtime.step_context import StepContext, outcomes, run_folder
from fedemb.storage import join, open_store


@step(
    image="light",
    private=False,
    outputs={"outcome": Public, "summary": Public, "metrics": Public, "verdict": Public},
)
def show_outcome(
    status: dsl.PipelineTaskFinalStatus,
    run_id: str,
    reused: str,
    mlflow: str,
    purpose: str,
    task: str,
    policy: str,
    mechanism: str,
    data: str,
    partition: str,
    model: str,
    pretraining: str,
    training: str,
    seed: int,
    tuning: str,
    evaluation: str,
    audit: str,
    release: str,
    outcome: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
    verdict: dsl.Output[dsl.Artifact],
):
    """Shows how the run ended: verdict, figures and every reason. It decides nothing."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.show_outcome import Started, run

    # Parameters that are not a valid configuration end a run; this step shows that too.
    started = Started.of(locals())
    outputs = {"outcome": outcome, "summary": summary, "metrics": metrics, "verdict": verdict}
    with step_process("show_outcome", outputs) as context:
        for name, value in run(context, started, uri=outcome.uri, state=status.state).items():
            metrics.log_metric(name, value)


_LOG = logging.getLogger(__name__)
_COMPLETED = {"COMPLETE": True, "SUCCEEDED": True, "FAILED": False, "ERROR": False}
"""State of the run in ML Metadata and in KFP -> whether all steps succeeded."""
D = TypeVar("D", bound=Document)


@dataclass(frozen=True, kw_only=True)
class Started:
    """Parameters of a run. Without any, only its outputs are known."""

    run_id: str = ""
    """Id in the ledger, which a resumed run has from the first one; empty: not known."""
    config: RunConfig | None = None
    """None: the parameters are not a valid configuration. Stores are left out."""
    mlflow: str = ""
    """Address of a tracking server; empty: none."""
    reused: Mapping[str, str] = field(default_factory=dict)
    """Output -> its address in an earlier run, for a run that was resumed from a step."""

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Started:
        """Reads the parameters of the step; a value that is not valid is left out."""
        try:
            config = run_config({**values, **dict.fromkeys(OPTIONAL_STORES, "")})
        except ConfigError:
            config = None
        try:
            reused = {
                str(name): str(uri) for name, uri in json.loads(str(values["reused"])).items()
            }
        except (ValueError, AttributeError):
            reused = {}
        return cls(
            run_id=str(values["run_id"]),
            config=config,
            mlflow=str(values["mlflow"]).strip(),
            reused=reused,
        )


def read_documents(addresses: Sequence[str], own: str) -> Documents:
    """Returns the matching documents of a run: the newest verdict, and the documents it names.

    A retried step leaves a second copy at another address. The verdict names its privacy report,
    which names its other documents. None: missing or invalid.

    Args:
      addresses: all outputs of the run.
      own: its folder; an unreadable output of an earlier run elsewhere is left out.

    Raises:
      StorageError: the public root cannot be read.
    """

    def copies(name: str, *kinds: type[D]) -> list[Written[D]]:
        read = [documents_at(addresses, name, kind, own) for kind in kinds]
        return [item for found in read for item in found]

    verdict = newest_verdict(copies("verdict", VerdictDocument))
    report = _named(copies("privacy_report", PrivacyReport), verdict and verdict.body.report_sha)
    named = report and report.body.provenance
    measured: list[Written[AnyUtility]] = copies("utility_report", UtilityReport, ClassifierReport)
    return {
        "verdict": verdict,
        "privacy_report": report,
        "utility_report": _named(measured, named and named.utility_document),
        "audit_report": _named(copies("audit_report", AuditReport), named and named.audit_document),
        "privacy_plan": _named(copies("privacy_plan", PrivacyPlan), named and named.plan_document),
    }


def documents_at(
    addresses: Iterable[str], name: str, kind: type[D], own: str = ""
) -> list[Written[D]]:
    """Returns the outputs with a name, of any task, that are documents of a kind.

    Raises:
      StorageError: an output below `own` cannot be read.
    """
    found: list[Written[D]] = []
    for folder, _, last in (address.rpartition("/") for address in addresses):
        if last == name:
            try:
                found.append(parse(open_store(folder).read(last), kind, name))
            except (ArtifactError, FileNotFoundError):
                continue
            except (InputError, StorageError):
                if folder.startswith(own):
                    raise
    return found


def newest_verdict(found: Iterable[Written[VerdictDocument]]) -> Written[VerdictDocument] | None:
    """Returns the verdict with the most ledger records; a retried gate leaves several."""
    return max(
        found, key=lambda item: (item.body.ledger_sequence or -1, item.body.allow), default=None
    )


def _named(found: Sequence[Written[D]], sha: str | None) -> Written[D] | None:
    """Returns the document with a digest, or the last one if the digest is None or missing."""
    named = [item for item in found if item.sha == sha]
    return (named or list(found) or [None])[-1]


def run(context: StepContext, started: Started, *, uri: str, state: str) -> dict[str, float]:
    """Writes the pages `outcome` and `summary`, and a copy of the `verdict`.

    The other outputs of the run are beside `uri`, the address of `outcome`.
    Then it writes the run to MLflow, if an address is set; that cannot fail the step.

    Returns: Metrics for the comparison of runs; only those that the run has.

    Raises:
      StorageError: the public root cannot be read.
    """
    folder = run_folder(uri, "show-outcome")
    own = [join(folder, path) for path in open_store(folder).list()]
    addresses = [*started.reused.values(), *own]
    documents = read_documents(addresses, folder)
    verdict = documents["verdict"]
    release = next(iter(documents_at(own, "release", ReleaseManifest)), None)
    failed = sorted(outcomes(folder, _files), key=lambda item: str(item["step"]))
    facts = replace(
        RunFacts.of(documents),
        released=release is not None,
        failures=[
            Failure(item["step"], int(item["exit_code"]), item["error"], item["message"])
            for item in failed
        ],
        completed=_COMPLETED.get(state),
    )
    found = headline(facts)
    shown = run_page(
        facts,
        found,
        run=folder.rstrip("/").rpartition("/")[2],
        release=release and f"{release.body.name}/{release.body.version}",
        pages={address.rpartition("/")[2]: address for address in addresses},
    )
    page = render("run_page.html", **shown, folder=folder, steps=()).encode()
    write_bytes(context.artifacts.outcome, page)
    write_bytes(context.artifacts.summary, render("summary.md.j2", **shown).encode())
    write_bytes(context.artifacts.verdict, verdict.data if verdict else b"{}")
    _track(found, page, documents, started)
    code = {} if found.exit_code is None else {"exit_code": float(found.exit_code)}
    allowed = {"allowed": float(verdict.body.allow)} if verdict else {}
    return {**code, **allowed, **facts.figures()}


def _track(found: Headline, page: bytes, documents: Documents, started: Started) -> None:
    """Writes the run to MLflow, if it has an address; a failure is one line in the log.

    This step has no key and no ledger, so no signature is checked; a tag of the run says so.
    """
    if not started.mlflow:
        return
    if started.config is None:
        _LOG.warning("mlflow: not written: the parameters are not a valid configuration")
        return
    run = TrackedRun(
        name=started.run_id,
        headline=found,
        config=started.config,
        documents=documents,
        pages={"outcome.html": page},
        signatures="not checked",
    )
    if problem := log_in_time(run, started.mlflow):
        _LOG.warning("mlflow: not written: %s", problem)


def _files(name: str) -> tuple[str, ...]:
    """Returns the file outputs of a step; empty for a step unknown to this version."""
    try:
        return declared(name).files
    except ModuleNotFoundError:
        return ()
