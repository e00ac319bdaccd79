"""The study's figure and its self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedemb.documents.artifacts import write_bytes
from fedemb.reports.charts import SERIES, SOFT, figure_svg, new_figure
from fedemb.reports.report import write_page
from studies.utility.rows import METHODS, Method
from studies.utility.table import Line

CURVES: tuple[Method, ...] = ("fedemb", "ftrl", "fedavg")
LEVELS: tuple[tuple[str, Any], ...] = (("centralized", "-"), ("public_only", (0, (4, 3))))
ALT = "Recall at false accept rate 1e-3 against the noise on the mean, by method"
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_STANDALONE = (
    "<style>svg{color:#1c2430}@media(prefers-color-scheme:dark)"
    "{svg{color:#e8e6e1;--soft:#a7adb8;--line:#3a404b;--series-1:#72c2dc;--series-2:#f0a266;"
    "--series-3:#b9a6f2}}</style>"
)
"""Colours of a figure that stands outside a page."""


def figure(lines: Sequence[Line]) -> Markup:
    """Recall against noise: a curve and the spread over seeds per method, levels without noise."""
    drawing = new_figure(7.4, 4.2)
    axes = drawing.axes[0]
    for position, method in enumerate(CURVES):
        points = sorted(
            (line for line in lines if line.method == method and line.noise),
            key=lambda line: line.noise,
        )
        if not points:
            continue
        x, y = [p.noise for p in points], [_headline(p) for p in points]
        colour = SERIES[position]
        axes.plot(
            x, y, color=colour, linestyle=_DASHES[position], marker="o", label=METHODS[method]
        )
        below = [value - (p.spread or 0) for value, p in zip(y, points, strict=True)]
        above = [value + (p.spread or 0) for value, p in zip(y, points, strict=True)]
        axes.fill_between(x, below, above, color=colour, alpha=0.18, linewidth=0)
    for line in lines:
        free = "FedEmb, not private" if line.method == "fedemb" and not line.noise else None
        for method, dash in (*LEVELS, ("fedemb", (0, (1, 2)))):
            if line.method == method and not line.noise:
                name = free or METHODS[line.method]  # pyright: ignore[reportArgumentType]
                axes.axhline(_headline(line), color=SOFT, linewidth=1.1, linestyle=dash, label=name)
    axes.set_xscale("log")
    shown = [_headline(line) for line in lines if line.method != "untrained"]
    axes.set_ylim(bottom=0.85 * min(shown, default=0.0))
    axes.set_xlabel("noise on the mean update / clip")
    axes.set_ylabel("recall at FAR 1e-3, unseen identities")
    axes.legend(loc="lower left", fontsize=8.5, frameon=False, ncols=2)
    return figure_svg(drawing, ALT)


def standalone(svg: str) -> bytes:
    """The figure as a file of its own, legible on light and dark pages."""
    opening, rest = str(svg).split(">", 1)  # str: Markup would escape what is added
    return f"{opening}>{_STANDALONE}{rest}".encode()


def _headline(line: Line) -> float:
    return next(iter(line.recall.values()))


def verdict(lines: Sequence[Line]) -> str:
    """What the study found, in plain sentences, whatever it found."""
    by_key = {(line.method, line.noise): line for line in lines}
    central = by_key.get(("centralized", 0.0))
    noisy = [line for line in lines if line.method == "fedemb" and line.noise]
    if central is None or not noisy:
        return "The rows that this study compares are not all there yet; run it again to go on."
    worst = max(noisy, key=lambda line: line.noise)
    best = max(noisy, key=_headline)
    said = [
        f"DP-FedEmb reaches {_headline(best):.3f} at noise {best.noise:g} "
        f"({100 * (best.relative or 0):+.0f} % against {_headline(central):.3f} centralized)"
    ]
    if best.gain is not None and best.gain_low is not None:
        sure = "outside" if best.gain_low > 0 else "inside"
        said.append(
            f"its gain over public pretraining alone is {best.gain:+.3f}, {sure} the 95 % interval"
        )
    if other := by_key.get(("fedavg", worst.noise)):
        difference = _headline(worst) - _headline(other)
        said.append(
            f"at noise {worst.noise:g} it is {difference:+.3f} against DP-FedAvg at equal noise"
        )
    return "; ".join(said) + "."


def write_study(folder: Path, lines: Sequence[Line], context: dict[str, Any]) -> list[Path]:
    """Writes `study.svg` and `study.html`; `context` is what the template names besides."""
    svg = figure(lines)
    write_bytes(folder / "study.svg", standalone(svg))
    write_page(
        folder / "study.html",
        Path(__file__).with_name("study.html"),
        tone="plain",
        chart=svg,
        verdict_text=verdict(lines),
        **context,
    )
    return [folder / "study.svg", folder / "study.html"]
