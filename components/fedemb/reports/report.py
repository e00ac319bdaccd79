"""Pages for people: self-contained HTML from templates, and the frame of every chart in them.

A page opens without a network, in light and dark, on paper and on a phone. Templates live in
`templates/`, extend `base.html` (blocks `title`, `kicker`, `verdict`, `body`, `footer`) and build
their parts with the macros of `macros.html`, which every template reaches as `ui`. Nothing here
reads a clock or draws a random number: the same context gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from fedemb.documents.artifacts import write_bytes
from fedemb.errors import ArtifactError
from fedemb.reports.charts import Bar, Line, bar_chart, figure_svg, histogram_chart, line_chart

__all__ = [
    "Bar",
    "Line",
    "bar_chart",
    "figure_svg",
    "histogram_chart",
    "line_chart",
    "render",
    "render_run_index",
    "write_page",
]

TEMPLATES = Path(__file__).parent / "templates"


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


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sig": significant, "percent": percent, "seconds": seconds}
    environment.globals["ui"] = environment.get_template("macros.html").module
    return environment


def render(template: str | Path, **context: Any) -> str:
    """Renders a template to one self-contained page.

    Args:
      template: file name in `templates/`, e.g. `utility_report.html`, or a path elsewhere.
      **context: what the template names; a name it uses and does not get is an error.

    Raises:
      ArtifactError: the template is missing, broken, or uses a value it was not given.
    """
    try:
        known = _environment()
        if isinstance(template, Path):
            return known.from_string(template.read_text(encoding="utf-8")).render(**context)
        return known.get_template(template).render(**context)
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

_COLUMN, _ROW, _BOX_WIDTH, _BOX_HEIGHT = 188, 68, 172, 44


def _layers(steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Row of each step: the longest way to it from a start; a start stands just above its user."""
    layer: dict[str, int] = {}
    for step in steps:
        missing = [name for name in step["after"] if name not in layer]
        if missing:
            raise ArtifactError(
                f"step {step['name']} comes after {missing[0]}, which is not listed before it; "
                "list the steps in the order they run"
            )
        layer[step["name"]] = 1 + max((layer[name] for name in step["after"]), default=-1)
    for step in steps:
        users = [layer[other["name"]] for other in steps if step["name"] in other["after"]]
        if not step["after"] and users:
            layer[step["name"]] = min(users) - 1
    return layer


def layout_dag(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Places the steps of a run on a grid, top to bottom, for the SVG of the index page.

    Returns:
      `width`, `height`, `boxes` (the steps with `x`, `y`, `width`, `height`) and `edges` (SVG path
      data). An edge that another path already implies is left out.

    Raises:
      ArtifactError: a step comes after one that is not listed before it.
    """
    layer = _layers(steps)
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for step in steps:
        rows.setdefault(layer[step["name"]], []).append(step)
    columns = max(len(row) for row in rows.values())
    width = columns * _COLUMN
    boxes = []
    for depth, row in sorted(rows.items()):
        left = (width - len(row) * _COLUMN) / 2 + (_COLUMN - _BOX_WIDTH) / 2
        for position, step in enumerate(row):
            box = {"x": left + position * _COLUMN, "y": depth * _ROW + 4}
            boxes.append({**step, **box, "width": _BOX_WIDTH, "height": _BOX_HEIGHT})
    place = {box["name"]: box for box in boxes}
    above = _ancestors(steps)
    edges = []
    for step in steps:
        for name in step["after"]:
            if any(name in above[other] for other in step["after"] if other != name):
                continue
            start, end = place[name], place[step["name"]]
            x1, y1 = start["x"] + _BOX_WIDTH / 2, start["y"] + _BOX_HEIGHT
            x2, y2 = end["x"] + _BOX_WIDTH / 2, end["y"]
            bend = (y2 - y1) / 2 if layer[step["name"]] - layer[name] == 1 else _ROW / 3
            edges.append(f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}")
    return {"width": width, "height": len(rows) * _ROW - 14, "boxes": boxes, "edges": edges}


def _ancestors(steps: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    above: dict[str, set[str]] = {}
    for step in steps:
        above[step["name"]] = set(step["after"]).union(*(above[name] for name in step["after"]))
    return above


def render_run_index(
    *,
    run_id: str,
    purpose: str,
    guarantee: str,
    utility: str,
    release: str,
    steps: Sequence[Mapping[str, Any]],
    reports: Sequence[Mapping[str, Any]] = (),
    budget: Mapping[str, Any] | None = None,
    artifacts: Sequence[Mapping[str, Any]] = (),
    facts: Sequence[tuple[str, Any]] = (),
) -> str:
    """Renders the index page of one run (`run_index.html`).

    Args:
      run_id: name of the run.
      purpose: `release` or `simulation`.
      guarantee: the sentence after `guarantee:` of the run's closing lines.
      utility: the sentence after `utility:`.
      release: what follows `release:`; `refused: ...` and `none (simulation)` colour the page.
      steps: in the order they run, mappings with `name`, `after` (names of the steps before it),
        `status` (`done` | `running` | `failed` | `refused` | `skipped` | `waiting`), `seconds`
        (float or None) and optionally `href` (a report).
      reports: mappings with `title`, `href` (relative to the page) and `sentence`.
      budget: mapping with `label`, `spent_before`, `spent_now`, `cap` (epsilons at one delta).
      artifacts: mappings with `name`, `kind` (`Raw` | `Noised` | `Public` | free words), `step`,
        `path` (relative; shown, not linked) and `digest` (hex, or None: a Raw has a keyed
        commitment only).
      facts: further pairs for the table of facts (configuration digest, versions).

    Raises:
      ArtifactError: a step comes after one that is not listed before it.
    """
    refused = release.startswith("refused")
    simulation = purpose == "simulation"
    listed = [{"href": None, **step} for step in steps]
    return render(
        "run_index.html",
        tone="bad" if refused else "plain" if simulation else "good",
        run_id=run_id,
        purpose=purpose,
        guarantee=guarantee,
        utility=utility,
        release=release,
        dag=layout_dag(listed),
        steps=listed,
        reports=reports,
        budget=budget,
        artifacts=artifacts,
        facts=facts,
    )
