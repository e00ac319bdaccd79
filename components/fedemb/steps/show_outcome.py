"""The first page of a run in Kubeflow, also after a failed step.

Kubeflow shows only exit code 1, and no output of a failed step. This step runs at the end
regardless of the run's outcome, and collects the outputs of the other steps in the public root. It
reads no ledger and has no key, so it verifies nothing, and no decision depends on it. The gate has
decided, and `fedemb verify` verifies a release.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from fedemb.reports.headline import Failure, Headline, RunFacts, headline
from fedemb.reports.mlflow import TrackedRun, log_in_time
from fedemb.reports.report import render
from fedemb.runtime.step import declared, step
from fedemb.runtime.step_context import StepContext, StepFailure, outcomes, run_folder
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


PAGES = {
    "privacy_page": "Privacy report",
    "utility_page": "Utility report",
    "audit_page": "Audit report",
    "verdict_page": "Gate checklist",
}
"""Output of a step -> display name."""
EXIT_CODES = {
    1: "A bug or a broken environment: report the log.",
    2: "The configuration or an input is wrong: correct it, then start a new run.",
    3: "Refused by a rule of privacy: a retry is refused too.",
    4: "A store could not be reached: retry under the same run id.",
    5: "Interrupted: submit again under the same run id to resume.",
    6: "Waiting for approvals: pass the run's id to `fedemb approve RUN --key KEY --host URL`.",
}
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


@dataclass(frozen=True)
class Output:
    """An output of a step."""

    name: str
    uri: str
    """Its address."""
    store: str
    """Address of the store that is opened to read it."""
    earlier: bool = False
    """Whether an earlier run wrote it; if it cannot be read, it is left out."""


def outputs_of(folder: str, reused: Mapping[str, str]) -> list[Output]:
    """Returns the outputs of a run; those reused from earlier runs come first.

    Raises:
      StorageError: the public root cannot be read.
    """
    earlier = [
        Output(name, uri, uri.rpartition("/")[0], earlier=True) for name, uri in reused.items()
    ]
    own = open_store(folder).list()
    return [
        *earlier,
        *(Output(path.rpartition("/")[2], join(folder, path), folder) for path in own),
    ]


@dataclass(frozen=True)
class RunDocuments:
    """The readable documents of a run; None if missing or invalid."""

    verdict: Written[VerdictDocument] | None
    report: Written[PrivacyReport] | None
    utility: Written[AnyUtility] | None
    audit: Written[AuditReport] | None
    plan: Written[PrivacyPlan] | None
    release: Written[ReleaseManifest] | None


def read_documents(outputs: Sequence[Output]) -> RunDocuments:
    """Returns the matching documents of a run: the newest verdict, and the documents it names.

    A retried step leaves a second copy at another address. The verdict with the most ledger records
    is the newest; it names its privacy report, which names its other documents.

    Raises:
      StorageError: the public root cannot be read.
    """
    verdicts = _copies(outputs, "verdict", VerdictDocument)
    verdict = max(
        verdicts,
        key=lambda item: (item.body.ledger_sequence or -1, item.body.allow),
        default=None,
    )
    reports = _copies(outputs, "privacy_report", PrivacyReport)
    report = _named(reports, None if verdict is None else verdict.body.report_sha)
    named = None if report is None else report.body.provenance
    measured: list[Written[AnyUtility]] = [
        *_copies(outputs, "utility_report", UtilityReport),
        *_copies(outputs, "utility_report", ClassifierReport),
    ]
    utility = _named(measured, named and named.utility_document)
    audit = _named(_copies(outputs, "audit_report", AuditReport), named and named.audit_document)
    plan = _named(_copies(outputs, "privacy_plan", PrivacyPlan), named and named.plan_document)
    release = next(iter(_copies(outputs, "release", ReleaseManifest)), None)
    return RunDocuments(verdict, report, utility, audit, plan, release)


def _copies(outputs: Sequence[Output], name: str, kind: type[D]) -> list[Written[D]]:
    """Returns the outputs with a name, of any task, that are documents of a kind."""
    found: list[Written[D]] = []
    for output in outputs:
        if output.name == name:
            try:
                path = output.uri.removeprefix(output.store).lstrip("/")
                found.append(parse(open_store(output.store).read(path), kind, name))
            except (ArtifactError, FileNotFoundError):
                continue
            except (InputError, StorageError):
                if not output.earlier:
                    raise
    return found


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
    outputs = outputs_of(folder, started.reused)
    documents = read_documents(outputs)
    verdict, report, utility = documents.verdict, documents.report, documents.utility
    failed = sorted(outcomes(folder, _files), key=lambda item: str(item["step"]))
    facts = RunFacts(
        verdict=verdict and verdict.body,
        report=report and report.body,
        utility=utility and utility.body,
        released=documents.release is not None,
        failures=[
            Failure(str(item["step"]), int(item["exit_code"]), str(item.get("error", "")))
            for item in failed
        ],
        completed=_COMPLETED.get(state),
    )
    found, addresses = headline(facts), {output.name: output.uri for output in outputs}
    shown = shown_of(
        folder,
        found=found,
        facts=facts,
        failed=failed,
        release=documents.release,
        addresses=addresses,
    )
    page = render("run_outcome.html", **shown).encode()
    write_bytes(context.artifacts.outcome, page)
    write_bytes(context.artifacts.summary, render("summary.md.j2", **shown).encode())
    write_bytes(context.artifacts.verdict, verdict.data if verdict else b"{}")
    _track(found, page, documents, started)
    code = {} if found.exit_code is None else {"exit_code": float(found.exit_code)}
    allowed = {"allowed": float(verdict.body.allow)} if verdict else {}
    return {**code, **allowed, **facts.figures()}


def shown_of(
    folder: str,
    *,
    found: Headline,
    facts: RunFacts,
    failed: Sequence[StepFailure],
    release: Written[ReleaseManifest] | None,
    addresses: Mapping[str, str],
) -> dict[str, object]:
    """Returns the content of both pages. HTML in Kubeflow may have no links; Markdown may.

    Args:
      folder: public folder of the run.
      found: headline of the run.
      facts: facts behind the headline.
      failed: content of `outcome.json` of each failed step.
      release: the published release.
      addresses: output of a step -> its address.
    """
    return {
        "folder": folder,
        "run": folder.rstrip("/").rpartition("/")[2],
        "policy": facts.report.cumulative.policy_id if facts.report else None,
        "headline": found,
        "failed": [
            {**item, "remedy": EXIT_CODES.get(int(item["exit_code"]), "See the log of the step.")}
            for item in failed
        ],
        "verdict": facts.verdict,
        "release": release,
        "reports": [(PAGES[name], name, addresses[name]) for name in PAGES if name in addresses],
    }


def _track(found: Headline, page: bytes, documents: RunDocuments, started: Started) -> None:
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
        documents={
            "privacy_report": documents.report,
            "utility_report": documents.utility,
            "audit_report": documents.audit,
            "verdict": documents.verdict,
            "privacy_plan": documents.plan,
        },
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
