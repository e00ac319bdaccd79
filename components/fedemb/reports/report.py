"""HTML pages: self-contained, rendered from templates, and the frame of every chart in them.

A page works without a network, in light and dark mode, on paper and on a phone. Templates are in
`templates/`, extend `base.html` (blocks `title`, `kicker`, `verdict`, `body`, `footer`) and build
their parts with the macros of `macros.html`, available to every template as `ui`. This module reads
no clock and draws no random number: the same context gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup, escape

from fedemb.documents.fields import Interval
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError
from fedemb.foundation.files import write_bytes
from fedemb.reports.charts import (
    Axis,
    Bar,
    Line,
    bar_chart,
    figure_svg,
    histogram_chart,
    line_chart,
)
from fedemb.reports.dag import layout_dag

__all__ = [
    "Axis",
    "Bar",
    "Line",
    "RunIndex",
    "bar_chart",
    "figure_svg",
    "histogram_chart",
    "line_chart",
    "render",
    "render_run_index",
    "write_page",
]

TEMPLATES = Path(__file__).parent / "templates"
WAY_BACK = "<!-- way back -->"
"""Placeholder of the link from a report page to the page of its run."""
_CONTENTS_FROM = 4
"""Minimum number of sections for a table of contents."""


def significant(value: float | None, digits: int = 3) -> str:
    """Formats a number for reading: `digits` significant digits, thousands kept whole.

    >>> significant(0.0012345), significant(3.14159), significant(32000), significant(1e-6)
    ('0.00123', '3.14', '32,000', '1e-06')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text.replace("e+0", "e").replace("e+", "e")


def percent(value: float | None, digits: int = 1) -> str:
    """Formats a share: `0.123` becomes `12.3 %`."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Formats a duration: `0.21` becomes `0.2 s`, `75` becomes `1 min 15 s`."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def date(value: str) -> str:
    """Formats a time: `2026-11-22T03:17:39+00:00` becomes `22 November 2026, 03:17 UTC`."""
    return f"{datetime.fromisoformat(value):%-d %B %Y, %H:%M} UTC"


def link(text: str, address: str) -> Markup:
    """Returns text as a link to a file beside the page, or to a Google Cloud Storage folder.

    A browser cannot open addresses of other stores; these stay text.
    """
    scheme, separator, rest = address.partition("://")
    if scheme == "gs" and separator:
        href = f"https://console.cloud.google.com/storage/browser/{quote(rest)}"
    elif separator:
        return escape(text)
    else:
        href = quote(address)
    return Markup('<a href="{}">{}</a>').format(href, text)


def tone_of(gain: Interval | None) -> str:
    """Returns the colour of a page of figures: by a significant gain or loss."""
    if gain is None:
        return "plain"
    return "good" if gain.low > 0 else "bad" if gain.high < 0 else "plain"


def with_contents(body: str) -> Markup:
    """Adds anchors to the sections of a page and, if there are several, a table of contents."""
    titles: list[tuple[str, str]] = []

    def anchored(found: re.Match[str]) -> str:
        anchor = re.sub(r"\W+", "-", found[1].lower()).strip("-")
        titles.append((anchor, found[1]))
        return f'<h2 id="{anchor}">{found[1]}</h2>'

    body = re.sub(r"<h2>(.*?)</h2>", anchored, body)
    if len(titles) < _CONTENTS_FROM:
        return Markup(body)
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in titles)
    return Markup(f'<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>\n{body}')


def unbroken(page: str) -> str:
    """Keeps numbers such as 1e-05, and intervals, on one line; skips `commands`."""

    def keep(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith("<"):
            return text
        numbers = r"\d[\d.]*e-?\d+|\d[\d.]* (?:%|s\b)|\[[-+\d.]+, [-+\d.]+\]"
        text = re.sub(numbers, r'<span class="number">\g<0></span>', text)
        return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", text)

    whole = "<(svg|style|title|pre|code)\\b.*?</\\1>|<[^>]*>|[^<]+"
    return re.sub(whole, keep, page, flags=re.DOTALL)


@cache
def signer_name(actor: str) -> str:
    """Returns the name of who signed a record of the policy owner; without one, the role."""
    return "the policy owner" if actor in ("", "unnamed") else actor


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sig": significant,
        "percent": percent,
        "seconds": seconds,
        "date": date,
        "with_contents": with_contents,
        "link_to": link,
        "signer": signer_name,
    }
    environment.globals["ui"] = environment.get_template("macros.html").module
    return environment


def render(template: str | Path, **context: Any) -> str:
    """Renders a template to one self-contained page.

    Args:
      template: file name in `templates/`, e.g. `utility_report.html`, or a path elsewhere.
      **context: values of the template; a missing name is an error.

    Raises:
      ArtifactError: the template is missing, broken, or uses a value that is not in `context`.
    """
    try:
        known = _environment()
        if isinstance(template, Path):
            page = known.from_string(template.read_text(encoding="utf-8"))
        else:
            page = known.get_template(template)
        return unbroken(page.render(**context))
    except TemplateError as error:
        raise ArtifactError(
            f"the page {template} cannot be drawn: {error.message}; pass what the template names"
        ) from error


def write_page(path: Path, template: str | Path, **context: Any) -> None:
    """Renders a template and writes it atomically.

    Raises:
      ArtifactError: as `render`.
      StorageError: the folder cannot be written.
    """
    write_bytes(path, render(template, **context).encode())


# ---- the index page of a run --------------------------------------------------------------------


class _Figures(Protocol):
    def rows(self) -> Sequence[object]: ...


class RunState(Protocol):
    """State of a run, as its pages show it."""

    @property
    def tone(self) -> str:
        """Colour of the headline."""
        ...

    @property
    def figures(self) -> _Figures:
        """Figures below the headline."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunIndex:
    """Content of the index page of one run."""

    run_id: str
    purpose: str
    """`release` or `simulation`."""
    headline: RunState
    """`reports.headline.Headline`."""
    guarantee: str
    """Sentence after `guarantee:` of the run's closing lines."""
    utility: str
    """Sentence after `utility:`."""
    release: str
    """Sentence after `release:`."""
    steps: Sequence[Mapping[str, object]]
    """In execution order, mappings with `name`, `after` (names of the preceding steps), `status`
    (`done` | `running` | `failed` | `refused` | `stopped` | `skipped` | `waiting`), `seconds`
    (float or None) and optionally `href` (a report)."""
    reports: Sequence[Mapping[str, object]] = ()
    """Mappings with `title`, `href` (relative to the page) and `sentence`."""
    budget: Mapping[str, object] | None = None
    """Mapping with `label`, `spent_before`, `spent_now`, `cap` (epsilons at one delta)."""
    artifacts: Sequence[Mapping[str, object]] = ()
    """Mappings with `name`, `kind` (`Raw` | `Noised` | `Public` | free text), `step`, optionally
    `path` (relative; linked) and `digest` (hex, or None: a Raw has a keyed commitment only)."""
    facts: Sequence[tuple[str | Markup, str | Markup]] = ()
    """Further pairs for the table of facts (configuration digest, versions)."""
    verdict: VerdictDocument | None = None
    """Verdict of the gate."""
    time: str | None = None
    """End time of the run, ISO 8601."""


def render_run_index(run: RunIndex) -> str:
    """Renders the index page of one run (`run_index.html`).

    Raises:
      ArtifactError: `after` names a step that is not listed earlier.
    """
    steps = [{"href": None, **step, "lines": [_state(step)]} for step in run.steps]
    shown = {
        "artifacts": [{"path": None, **artifact} for artifact in run.artifacts],
        "steps": steps,
        "dag": layout_dag(steps),
        "tone": run.headline.tone,
        "figures": run.headline.figures.rows(),
    }
    return render("run_index.html", **{**vars(run), **shown})


def _state(step: Mapping[str, Any]) -> str:
    took = "" if step["seconds"] is None else f" · {seconds(step['seconds'])}"
    return f"{step['status']}{took}"
