"""Reads the documents of a run in its public root; selects the valid one of several copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedemb.documents.audit import AuditReport
from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.plan import PrivacyPlan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.release import ReleaseMarker
from fedemb.documents.utility import AnyUtility, UtilityReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError, InputError, StorageError
from fedemb.foundation.document import Document, Written, parse
from fedemb.storage import join, open_store

D = TypeVar("D", bound=Document)


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

    def read(self) -> bytes:
        """Returns its content.

        Raises:
          StorageError: it cannot be read.
        """
        path = self.uri.removeprefix(self.store).lstrip("/")
        return open_store(self.store).read(path)


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
class RunPapers:
    """The readable documents of a run; None if missing or invalid."""

    verdict: Written[VerdictDocument] | None
    report: Written[PrivacyReport] | None
    utility: Written[AnyUtility] | None
    audit: Written[AuditReport] | None
    plan: Written[PrivacyPlan] | None
    release: ReleaseMarker | None


def read_papers(outputs: Sequence[Output]) -> RunPapers:
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
    releases = _copies(outputs, "release", ReleaseMarker)
    release = releases[0].body if releases else None
    return RunPapers(verdict, report, utility, audit, plan, release)


def _copies(outputs: Sequence[Output], name: str, kind: type[D]) -> list[Written[D]]:
    """Returns the outputs with a name, of any task, that are documents of a kind."""
    found: list[Written[D]] = []
    for output in outputs:
        if output.name == name:
            try:
                found.append(parse(output.read(), kind, name))
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
