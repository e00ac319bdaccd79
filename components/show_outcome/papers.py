"""Reads the documents of a run in its public root; selects the valid one of several copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedemb.documents.classifier import ClassifierReport
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.release import ReleaseResult
from fedemb.documents.utility import AnyUtility, UtilityReport
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError
from fedemb.foundation.document import Document, Written, parse
from fedemb.storage import Store

D = TypeVar("D", bound=Document)


@dataclass(frozen=True)
class RunPapers:
    """The readable documents of a run; None if missing or invalid."""

    verdict: Written[VerdictDocument] | None
    report: Written[PrivacyReport] | None
    utility: Written[AnyUtility] | None
    release: ReleaseResult | None


def read_papers(store: Store, names: Sequence[str]) -> RunPapers:
    """Returns the matching documents of a run: the newest verdict, and the documents it names.

    A retried step leaves a second copy at another address. The verdict with the most ledger records
    is the newest; it names its privacy report, which names its utility report.

    Args:
      store: the folder of the run.
      names: all names in it.

    Raises:
      StorageError: the public root cannot be read.
    """
    verdicts = _copies(store, names, "verdict", VerdictDocument)
    verdict = max(
        verdicts,
        key=lambda item: (item.body.ledger_sequence or -1, item.body.allow),
        default=None,
    )
    reports = _copies(store, names, "privacy_report", PrivacyReport)
    report = _named(reports, None if verdict is None else verdict.body.report_sha)
    measured: list[Written[AnyUtility]] = [
        *_copies(store, names, "utility_report", UtilityReport),
        *_copies(store, names, "utility_report", ClassifierReport),
    ]
    utility = _named(measured, None if report is None else report.body.provenance.utility_document)
    releases = _copies(store, names, "release", ReleaseResult)
    release = max((item.body for item in releases), key=lambda item: bool(item.uri), default=None)
    return RunPapers(verdict, report, utility, release)


def _copies(store: Store, names: Sequence[str], output: str, kind: type[D]) -> list[Written[D]]:
    """Returns the outputs with a name, of any task, that are documents of a kind."""
    found: list[Written[D]] = []
    for name in names:
        if name.rpartition("/")[2] == output:
            try:
                found.append(parse(store.read(name), kind, output))
            except ArtifactError:
                continue
    return found


def _named(found: Sequence[Written[D]], sha: str | None) -> Written[D] | None:
    """Returns the document with a digest, or the last one if the digest is None or missing."""
    named = [item for item in found if item.sha == sha]
    return (named or list(found) or [None])[-1]
