"""The figure of `fedemb extrapolate`: epsilon against users and compute."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedemb.privacy.planning.extrapolation import Point
from fedemb.reports.mechanism_text import TEXTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

_STYLE: dict[RcKeyType, object] = {
    "svg.hashsalt": "fedemb-extrapolation",
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0ddd6",
    "legend.frameon": False,
}


def extrapolation_svg(against_population: Sequence[Point], against_compute: Sequence[Point]) -> str:
    """Returns a stand-alone SVG with two panels, one curve per price; same points, same bytes.

    Mechanisms with equal prices share a curve, and its label names all of them. The image has no
    fixed size and fills its window or page.
    """

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1)
        _panel(upper, against_population, "population")
        _panel(lower, against_compute, "clients_per_round")
        for axes in (upper, lower):
            axes.set_ylabel("projected epsilon")
        upper.set_xlabel("users")
        lower.set_xlabel("virtual clients per round")
        users = f"{against_compute[0].population:,}" if against_compute else "0"
        upper.set_title("More users, compute and noise as planned", loc="left")
        lower.set_title(f"More compute at {users} users, same noise on the mean", loc="left")
        figure.suptitle(
            "Projections, not guarantees: no such run has been made.\n"
            "delta = users$^{-1.1}$; correlated noise at equal error of running sums",
            fontsize=8.5,
        )
        if upper.lines:
            figure.legend(
                *upper.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8
            )

    return as_svg(draw, (5.2, 6.6))


def as_svg(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Returns the drawing of `draw` on a figure of this size in inches, as a stand-alone SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", buffer.getvalue(), count=1)


def _panel(axes: Axes, points: Sequence[Point], x: str) -> None:
    curves: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for kind in dict.fromkeys(point.mechanism for point in points):
        own = [point for point in points if point.mechanism == kind]
        curve = tuple((getattr(point, x), point.epsilon) for point in own)
        curves.setdefault(curve, []).append(kind)
    for curve, kinds in curves.items():
        style = TEXTS[kinds[0]]
        axes.plot(
            [at for at, _ in curve],
            [epsilon for _, epsilon in curve],
            label=" = ".join(TEXTS[kind].label for kind in kinds),
            color=style.color,
            linestyle=style.dash,
            marker="o",
            markersize=3,
        )
    both_logarithmic(axes, sorted({getattr(point, x) for point in points}))


def both_logarithmic(axes: Axes, places: Sequence[float]) -> None:
    """Makes both axes logarithmic, with plain numbers at `places` and as many on the other."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter(_in_thousands)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = axes.get_ylim()
    # If the axis spans a decade or less, multiples also need labels.
    digits = "235" if high / low < 30 else ""
    axes.yaxis.set_minor_formatter(
        lambda value, _: f"{value:.1g}" if f"{value:.0e}"[0] in digits else ""
    )


def _in_thousands(value: float, _: float) -> str:
    """Formats a number as 0.0017, 64, 2,048, 16.4k, 100k, 30M."""
    if value < 1:
        return f"{value:.2g}"
    for unit, letter in ((1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if letter == 'k' else 1e6):.3g}{letter}"
    return f"{value:,.0f}"
