"""The index page of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from markupsafe import Markup

from fedemb.documents.verdict import VerdictDocument
from fedemb.reports.dag import DagStep, layout_dag
from fedemb.reports.headline import Headline
from fedemb.reports.report import render


class IndexBudget(TypedDict):
    """Budget of one block; epsilons at one delta."""

    label: str
    spent_before: float
    spent_now: float
    cap: float
    filtered: bool
    """Whether charges add up as Rényi divergences."""


class IndexArtifact(TypedDict):
    """An output of the run."""

    name: str
    kind: str
    """`Raw`, `Noised`, `Public` or free text."""
    step: str
    path: str | None
    """Relative to the page; linked."""
    digest: str | None
    """Hexadecimal; None: a Raw artifact, which has only a keyed commitment."""


@dataclass(frozen=True, kw_only=True)
class RunIndex:
    """Content of the page."""

    run_id: str
    purpose: Literal["release", "simulation"]
    headline: Headline
    guarantee: str
    """Sentence after `guarantee:` of the run's closing lines."""
    utility: str
    """Sentence after `utility:`."""
    release: str
    """Sentence after `release:`."""
    steps: Sequence[DagStep]
    """In execution order; a link leads to a report."""
    seconds: float
    """Duration of all steps."""
    reports: Sequence[tuple[str, str, str]] = ()
    """Title, address relative to the page, and a sentence."""
    budget: IndexBudget | None = None
    artifacts: Sequence[IndexArtifact] = ()
    facts: Sequence[tuple[str | Markup, str | Markup]] = ()
    """Further pairs for the table of facts (configuration digest, versions)."""
    verdict: VerdictDocument | None = None
    time: str | None = None
    """End time of the run, ISO 8601."""


def render_run_index(run: RunIndex) -> str:
    """Renders `run_index.html`.

    Raises:
      ArtifactError: `after` names a step that is not listed earlier.
    """
    head = run.headline
    shown = {"dag": layout_dag(run.steps), "tone": head.tone, "figures": head.figures.rows()}
    return render("run_index.html", **vars(run), **shown)
