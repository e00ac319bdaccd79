"""The figure of `fedemb plan --extrapolate`: how many users and how much compute it takes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from components.fedemb.privacy.extrapolation import Point

_STYLE: Any = {
    "svg.hashsalt": "fedemb-extrapolation",
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0ddd6",
    "legend.frameon": False,
}
_LOOKS = {
    "group_poisson_gaussian": ("#17627d", "-"),
    "user_poisson": ("#b4541a", "--"),
    "fixed_size": ("#8c6d1f", ":"),
    "tree_aggregation": ("#6a4fa3", "-."),
    "blt": ("#5c7a1f", (0, (6, 2, 1, 2, 1, 2))),
}


def extrapolation_svg(against_population: Sequence[Point], against_compute: Sequence[Point]) -> str:
    """Returns a stand-alone SVG with two panels, one curve per mechanism; same points, same bytes.

    Args:
      against_population: the plan's clients per round and noise, more users.
      against_compute: one population, clients per round and noise growing together.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(9.2, 3.9), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        _panel(left, against_population, "population")
        _panel(right, against_compute, "clients_per_round")
        left.set_xlabel("users (clients per round as planned)")
        left.set_ylabel("projected epsilon at delta = users$^{-1.1}$")
        users = f"{against_compute[0].population:,}" if against_compute else "0"
        right.set_xlabel(f"virtual clients per round, {users} users")
        left.set_title("more users", loc="left")
        right.set_title("more compute, same noise on the mean", loc="left")
        figure.suptitle("Projections, not guarantees: no such run has been made", fontsize=9)
        if left.lines:
            left.legend(fontsize=8)
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


def _panel(axes: Any, points: Sequence[Point], x: str) -> None:
    for kind in dict.fromkeys(point.mechanism for point in points):
        own = [point for point in points if point.mechanism == kind]
        colour, dash = _LOOKS[kind]
        axes.plot(
            [getattr(point, x) for point in own],
            [point.epsilon for point in own],
            label=kind.replace("_", " "),
            color=colour,
            linestyle=dash,
            marker="o",
            markersize=3,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
