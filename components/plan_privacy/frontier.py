"""The figure of `fedemb plan --frontier`: noise on the mean against rounds, one curve a batch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedemb.documents.artifacts import write_bytes
from fedemb.errors import ConfigError
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.frontier import FrontierPoint, frontier
from fedemb.steps.plan_privacy.figure import as_svg, both_logarithmic


def draw_frontier(
    plan: MechanismPlan,
    delta: float,
    target_epsilon: float | None,
    figure: Path,
    units_per_second: float | None = None,
) -> dict[str, Any]:
    """Finds the frontier and draws it.

    Args:
      plan: the setting in the middle.
      delta: total failure probability.
      target_epsilon: what every setting costs.
      figure: SVG to write.
      units_per_second: that a machine trains, for estimated minutes; None: no estimate.

    Raises:
      ConfigError: there is no target, or no batch to choose.
    """
    if target_epsilon is None:
        raise ConfigError("--frontier needs --target-epsilon: the settings it lists all cost that")
    points = frontier(plan, delta, target_epsilon)
    write_bytes(figure, frontier_svg(points, target_epsilon).encode())
    return {
        "figure": str(figure),
        "target_epsilon": target_epsilon,
        "points": [
            {**asdict(point), "minutes": _minutes(point, units_per_second)} for point in points
        ],
    }


def _minutes(point: FrontierPoint, units_per_second: float | None) -> float | None:
    return units_per_second and point.batch * point.rounds / units_per_second / 60


def frontier_svg(points: list[FrontierPoint], target_epsilon: float) -> str:
    """Returns a stand-alone SVG; same points, same bytes."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for batch in dict.fromkeys(point.batch for point in points):
            own = [point for point in points if point.batch == batch]
            full = own[0].full_batch
            axes.plot(
                [point.rounds for point in own],
                [point.noise_per_batch for point in own],
                label=f"{batch:,}" + (" (full batch)" if full else ""),
                linestyle="--" if full else "-",
                marker="o",
                markersize=3,
            )
        axes.set_xlabel("rounds")
        axes.set_ylabel("noise on the mean / clip")
        axes.set_title(f"Settings of epsilon {target_epsilon:g}, by expected batch", loc="left")
        both_logarithmic(axes, sorted({point.rounds for point in points}))
        figure.legend(title="batch", loc="outside right upper")

    return as_svg(draw, (5.2, 3.8))
