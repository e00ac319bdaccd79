"""The study's figure, and its result in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedemb.reports.charts import SERIES, SOFT, figure_svg, new_figure
from studies.utility.rows import METHODS, NETS, Method
from studies.utility.table import Line

ALT = "Recall at false accept rate 1e-3 by method and net, with intervals"
MARKS = ("o", "s")
_STANDALONE = (
    "<style>svg{color:#1c2430}@media(prefers-color-scheme:dark)"
    "{svg{color:#e8e6e1;--soft:#a7adb8;--line:#3a404b;--series-1:#72c2dc;--series-2:#f0a266;"
    "--series-3:#b9a6f2}}</style>"
)
"""Colours of a figure that stands outside a page."""


def figure(lines: Sequence[Line]) -> Markup:
    """Recall with its interval: a row per method and noise, a mark per net."""
    rows: list[tuple[Method, float]] = list(
        dict.fromkeys((line.method, line.noise) for line in lines)
    )
    drawing = new_figure(7.4, 0.9 + 0.42 * len(rows))
    axes = drawing.axes[0]
    nets = [net for net in NETS if any(line.net == net for line in lines)]
    for position, net in enumerate(nets):
        shown = [line for line in lines if line.net == net]
        y = [rows.index((line.method, line.noise)) + 0.24 * position - 0.12 for line in shown]
        x = [line.recall.value for line in shown]
        low, high = [r.recall.low for r in shown], [r.recall.high for r in shown]
        axes.hlines(y, low, high, color=SERIES[position], linewidth=1.4)
        color, mark = SERIES[position], MARKS[position]
        axes.plot(x, y, linestyle="none", markersize=5.5, color=color, marker=mark, label=net)
    names = [f"{METHODS[m]}, noise {noise:g}" if noise else METHODS[m] for m, noise in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.axhline(0, color=SOFT, linewidth=0)
    axes.set_xlabel("recall at FAR 1e-3, unseen identities of unseen alphabets")
    axes.legend(loc="upper right", fontsize=8.5, frameon=False)
    return figure_svg(drawing, ALT)


def standalone(svg: str) -> bytes:
    """The figure as a file of its own, legible on light and dark pages."""
    opening, rest = str(svg).split(">", 1)  # str: Markup would escape what is added
    return f"{opening}>{_STANDALONE}{rest}".encode()


def verdict(lines: Sequence[Line]) -> list[str]:
    """Returns one sentence with the result of each network and private method."""
    said = [_sentence(line) for line in lines if line.noise and line.relative and line.gain]
    return said or ["Some rows of this study are missing; run it again."]


def _sentence(line: Line) -> str:
    assert line.relative is not None
    assert line.gain is not None
    value, low, high = (100 * part for part in line.relative)
    sure = "above zero" if line.gain.low > 0 else "not certain"
    return (
        f"{line.net}, {line.name} at noise {line.noise:g}: {line.recall.value:.3f}, "
        f"{value:+z.0f} % [{low:+z.0f}, {high:+z.0f}] against the stronger centralized training; "
        f"gain over the public backbone {line.gain.value:+.3f}, {sure}."
    )
