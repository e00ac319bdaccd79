"""The pages of `show_outcome`: HTML for Kubeflow's frame, and Markdown with links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedemb.documents.release import ReleaseMarker
from fedemb.reports.formats import people_lines, plain
from fedemb.reports.headline import Headline, RunFacts
from fedemb.reports.lineage import StepLineage
from fedemb.reports.report import render
from fedemb.runtime.outcome import StepFailure

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


@dataclass(frozen=True)
class Shown:
    """Content of the pages."""

    folder: str
    """Public folder of the run."""
    headline: Headline
    facts: RunFacts
    failed: Sequence[StepFailure]
    """Content of `outcome.json` of each failed step."""
    release: ReleaseMarker | None
    pages: Mapping[str, str]
    """Output of a step -> its address."""
    lineage: Sequence[StepLineage]


def outcome_page(shown: Shown) -> str:
    """Returns the page as HTML, without scripts or external links, which Kubeflow forbids."""
    verdict = shown.facts.verdict
    return render(
        "run_outcome.html",
        tone=shown.headline.tone,
        run=shown.folder.rstrip("/").rpartition("/")[2],
        policy=shown.facts.report.cumulative.policy_id if shown.facts.report else None,
        headline=shown.headline,
        figures=shown.headline.figures.rows(),
        failed=[{**item, "remedy": _remedy(item)} for item in shown.failed],
        verdict=verdict,
        release=shown.release,
        reports=[(PAGES[name], name, shown.pages[name]) for name in PAGES if name in shown.pages],
        lineage=shown.lineage,
        folder=shown.folder,
    )


def summary(shown: Shown) -> str:
    """Returns a summary as Markdown, which may link to the reports."""
    lines = [f"# {plain(shown.headline.title)}", ""]
    lines += ["| figure | value | |", "|---|---|---|"]
    lines += [
        f"| {row.label} | {row.value} | {row.note} |" for row in shown.headline.figures.rows()
    ]
    for item in shown.failed:
        lines += ["", f"**{item['step']}** ended with exit code {item['exit_code']}, "]
        lines[-1] += f"{item.get('error', '')}:"
        lines += ["", f"> {plain(str(item.get('message', '')))}", "", _remedy(item)]
    verdict = shown.facts.verdict
    if verdict is not None:
        if verdict.reasons:
            lines += ["", "Rules that deny:", "", *(f"- `{code}`" for code in verdict.reasons)]
        if people := people_lines(verdict):
            lines += ["", *people]
    reports = [(PAGES[name], shown.pages[name]) for name in PAGES if name in shown.pages]
    if reports:
        lines += ["", *(f"- {_link(title, address)}" for title, address in reports)]
    if shown.release is not None:
        lines += ["", f"Release: `{shown.release.tree}` in the release store"]
    return "\n".join([*lines, "", "This page verifies nothing.", ""])


def _link(title: str, address: str) -> str:
    """Returns a link if a browser can open the address: Google Cloud has one per object."""
    if address.startswith("gs://"):
        return f"[{title}](https://storage.cloud.google.com/{address.removeprefix('gs://')})"
    return f"{title}: `{address}`"


def _remedy(item: StepFailure) -> str:
    return EXIT_CODES.get(int(item["exit_code"]), "See the log of the step.")
