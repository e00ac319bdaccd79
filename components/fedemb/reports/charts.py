"""Charts as inline SVG: deterministic, legible in light and dark mode, with text kept as text.

matplotlib draws in placeholder colours, which are then replaced by CSS variables of the page
(`--series-1`, ink, line), so that one drawing works in both colour schemes and in print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup, escape

from fedemb.documents.fields import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#010203", "#020304", "#030405"
SERIES = ("#11a001", "#11a002", "#11a003", "#11a004")
"""Placeholder colours: use these for drawing; `figure_svg` replaces them by the page's colours."""

_CSS = {
    INK: "currentColor",
    SOFT: "var(--soft, #565f6d)",
    LINE: "var(--line, #e0ddd6)",
    SERIES[0]: "var(--series-1, #17627d)",
    SERIES[1]: "var(--series-2, #b4541a)",
    SERIES[2]: "var(--series-3, #6a4fa3)",
    SERIES[3]: "var(--series-4, #5c7a1f)",
}
_STYLE = Path(__file__).with_name("charts.mplstyle")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 4)))


class Line(NamedTuple):
    """A named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    intervals: Mapping[float, Interval] = {}
    """Places on the horizontal axis -> the interval there."""


def new_figure(width: float = 5.0, height: float = 3.0) -> Figure:
    """Returns a matplotlib figure (inches) in the style of the pages, outside pyplot."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(fname=_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        figure.add_subplot()
    return figure


@contextmanager
def _axes(height: float = 3.0) -> Generator[tuple[Figure, Axes]]:
    """Yields a figure and its axes in the style of the pages, to be drawn and converted inside."""
    from matplotlib import rc_context

    figure = new_figure(height=height)
    with rc_context(fname=_STYLE):
        yield figure, figure.axes[0]


def figure_svg(figure: Figure, alt: str) -> Markup:
    """Converts a figure in the placeholder colours of this module to inline SVG.

    The same figure gives the same bytes: no date, and a hash salt from `alt`. Ids are unique, so
    that several charts can share a page.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.hashsalt": alt}, fname=_STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = "c" + sha256(alt.encode()).hexdigest()[:8]
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px '[^;\"]*", r"font-size: \1px", text)
    for stand_in, css in _CSS.items():
        text = text.replace(stand_in, css)
    opening = f'<svg role="img" aria-label="{escape(alt)}"'
    text = re.sub(r"<svg", opening, text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', r"\1", text, count=1)
    return Markup(text)


class Axis(NamedTuple):
    """Axis of a line chart."""

    label: str
    """With unit."""
    log: bool = False
    """Horizontal axis only: whether it is logarithmic."""
    limits: tuple[float, float] | None = None
    """Vertical axis only; None uses matplotlib's limits."""


def _diagonal(lines: Sequence[Line]) -> list[float]:
    """Returns points of the line y = x between the ends of curves, for logarithmic axes."""
    every = [x for line in lines for x in line.x] or [0.0, 1.0]
    grid = (10 ** (-6 + 6 * i / 200) for i in range(201))
    return [x for x in grid if min(every) <= x <= max(every)]


def line_chart(
    lines: Sequence[Line],
    *,
    x: Axis,
    y: Axis,
    alt: str,
    marks: Sequence[tuple[str, float]] = (),
    diagonal: str = "",
) -> Markup:
    """Draws curves, at most 20, distinguished by colour and dash.

    Args:
      lines: the curves.
      x: horizontal axis.
      y: vertical axis.
      alt: text description of the chart for screen readers.
      marks: named vertical lines.
      diagonal: label of the line y = x; empty: no such line.
    """
    with _axes() as (figure, axes):
        for position, line in enumerate(lines):
            colour, dash = SERIES[position % 4], _DASHES[position % 5]
            axes.plot(line.x, line.y, color=colour, linestyle=dash, label=line.name)
            for place, found in line.intervals.items():
                axes.plot([place, place], [found.low, found.high], color=colour, marker="_")
        if diagonal:
            grid = _diagonal(lines) if x.log else [0.0, 1.0]
            axes.plot(grid, grid, color=SOFT, linewidth=1.0, label=diagonal)
        for name, place in marks:
            axes.axvline(place, color=SOFT, linewidth=1.0, linestyle=(0, (2, 2)))
            axes.annotate(
                name, (place, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
                textcoords="offset points", fontsize=8.5, color=SOFT, ha="center", va="bottom",
            )  # fmt: skip
        if x.log:
            axes.set_xscale("log")
        if y.limits is not None:
            axes.set_ylim(*y.limits)
        axes.set_xlabel(x.label)
        axes.set_ylabel(y.label)
        if len(lines) + bool(diagonal) > 1:
            axes.legend()
        return figure_svg(figure, alt)


def bar_chart(
    figures: Sequence[tuple[str, Interval]],
    *,
    x_label: str,
    alt: str,
    x_limits: tuple[float, float] | None = None,
    reference: float | None = None,
) -> Markup:
    """Draws named figures as horizontal bars with their intervals, first on top.

    With `reference`, the value of no effect, the chart has dots instead of bars.
    """
    with _axes(height=0.75 + 0.36 * len(figures)) as (figure, axes):
        positions = list(range(len(figures)))[::-1]
        colours = [SERIES[series % 4] for series in range(len(figures))]
        values = [found.value for _, found in figures]
        if reference is None:
            axes.barh(positions, values, color=colours, height=0.55)
        else:
            axes.axvline(reference, color=SOFT, linewidth=1.0, linestyle=(0, (2, 2)))
            axes.scatter(values, positions, color=colours, s=42, zorder=3)
            axes.set_ylim(-0.6, len(figures) - 0.4)
        for position, (_, found) in zip(positions, figures, strict=True):
            axes.plot(
                [found.low, found.high], [position] * 2, color=INK, linewidth=1.2, marker="|"
            )  # fmt: skip
        axes.set_yticks(positions, [name for name, _ in figures])
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        if x_limits is not None:
            axes.set_xlim(*x_limits)
        axes.set_xlabel(x_label)
        shown = ", ".join(f"{name} {found.value:.3f}" for name, found in figures)
        return figure_svg(figure, f"{alt}: {shown}")
