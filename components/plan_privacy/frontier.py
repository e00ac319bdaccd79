"""Figure of `fedemb frontier`: settings of one epsilon, and the epsilon of other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from fedemb.foundation.files import write_bytes
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.planning.frontier import (
    NOISES,
    ROUNDS,
    FrontierPoint,
    PricePoint,
    frontier,
    prices_around,
)
from fedemb.steps.plan_privacy.figure import as_svg, both_logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENOUGH = 1.05
"""Maximum factor over the full batch's noise on the mean for an equally good smaller batch."""
_AXES = {
    "batch": "batch",
    "rounds": "rounds",
    "noise_per_batch": "noise on the mean / clip",
    "epsilon": "epsilon",
}


class Frontier(TypedDict):
    """Settings of one epsilon, as JSON."""

    figure: str
    """Path of the figure."""
    target_epsilon: float
    points: list[Mapping[str, float | None]]
    """Fields of `FrontierPoint`, and `minutes`: None without a speed."""
    prices: dict[str, list[Mapping[str, float]]]
    """Fields of `PricePoint` for other `rounds` and other `noise`."""
    full_batch: list[Mapping[str, float]]
    """See `full_batch_gains`."""


def draw_frontier(
    plan: MechanismPlan,
    delta: float,
    target_epsilon: float,
    figure: Path,
    units_per_second: float | None = None,
) -> Frontier:
    """Finds the frontier around a plan, draws it, and estimates minutes if a speed is given.

    Raises:
      ConfigError: the mechanism does not sample, so the batch cannot be chosen.
    """
    points = frontier(plan, delta, target_epsilon)
    speed = units_per_second and 60 * units_per_second
    longer = prices_around(plan, delta, rounds=ROUNDS)
    noisier = prices_around(plan, delta, noises=NOISES)
    write_bytes(figure, frontier_svg(points, longer, noisier, target_epsilon).encode())
    return {
        "figure": str(figure),
        "target_epsilon": target_epsilon,
        "points": [
            {**asdict(point), "minutes": speed and point.batch * point.rounds / speed}
            for point in points
        ],
        "prices": {
            "rounds": [asdict(point) for point in longer],
            "noise": [asdict(point) for point in noisier],
        },
        "full_batch": full_batch_gains(points),
    }


def full_batch_gains(points: Sequence[FrontierPoint]) -> list[Mapping[str, float]]:
    """Compares the full batch with smaller batches: noise on the mean, and work.

    Returns:
      For each number of rounds `rounds`, `smallest_batch` (the smallest whose noise on the mean is
      at most `ENOUGH` times that of the full batch), `noise` (full batch's / its own) and `work`
      (units a round, full batch's / its own).
    """
    found: list[Mapping[str, float]] = []
    for rounds in dict.fromkeys(point.rounds for point in points):
        own = sorted((p for p in points if p.rounds == rounds), key=lambda point: point.batch)
        full = own[-1]
        if not full.full_batch:
            continue
        least = full.noise_per_batch * ENOUGH
        small = next(point for point in own if point.noise_per_batch <= least)
        found.append(
            {
                "rounds": rounds,
                "smallest_batch": small.batch,
                "noise": full.noise_per_batch / small.noise_per_batch,
                "work": full.batch / small.batch,
            }
        )
    return found


class _Style(TypedDict):
    """Options of a curve."""

    color: str
    linestyle: str
    label: str


def _styles(points: Sequence[FrontierPoint | PricePoint]) -> dict[str, dict[int, _Style]]:
    """Returns colour, dash and label of the curve of each batch and each number of rounds."""
    batches = sorted({point.batch for point in points})
    full = {point.batch for point in points if point.full_batch}
    rounds = sorted({point.rounds for point in points})
    return {
        "batch": {
            batch: {
                "color": f"C{place}",
                "linestyle": "--" if batch in full else "-",
                "label": f"{batch:,}" + (" (full batch)" if batch in full else ""),
            }
            for place, batch in enumerate(batches)
        },
        "rounds": {
            count: {
                "color": f"{0.75 - 0.75 * place / len(rounds):.2f}",
                "linestyle": "-",
                "label": f"{count:,}",
            }
            for place, count in enumerate(rounds)
        },
    }


def frontier_svg(
    points: Sequence[FrontierPoint],
    longer: Sequence[PricePoint],
    noisier: Sequence[PricePoint],
    target_epsilon: float,
) -> str:
    """Returns a stand-alone SVG with five panels; same points, same bytes.

    Two panels show the noise on the mean of settings with the target epsilon. Three show epsilon:
    by rounds and by batch at one noise on the mean, and by noise at one number of rounds.
    """
    styles = _styles([*points, *longer, *noisier])

    def panel(
        axes: Axes, shown: Sequence[FrontierPoint | PricePoint], x: str, y: str, by: str
    ) -> None:
        for value, style in styles[by].items():
            own = sorted(
                (getattr(point, x), getattr(point, y))
                for point in shown
                if getattr(point, by) == value
            )
            if own:
                axes.plot(*zip(*own, strict=True), marker="o", markersize=3, **style)
        if y == "epsilon":
            axes.axhline(target_epsilon, color="#999999", linewidth=0.8)
        # A batch is an integer, so the noise on the mean differs slightly between batches.
        digits = 2 if x == "noise_per_batch" else 12
        places = {float(f"{getattr(point, x):.{digits}g}") for point in shown}
        both_logarithmic(axes, sorted(places))
        axes.set_xlabel(_AXES[x])
        axes.set_ylabel(_AXES[y])

    def draw(figure: Figure) -> None:
        (settings, where), (by_rounds, by_batch), (by_noise, legends) = figure.subplots(3, 2)
        panel(settings, points, "rounds", "noise_per_batch", by="batch")
        panel(where, points, "batch", "noise_per_batch", by="rounds")
        panel(by_rounds, longer, "rounds", "epsilon", by="batch")
        panel(by_batch, longer, "batch", "epsilon", by="rounds")
        panel(by_noise, noisier, "noise_per_batch", "epsilon", by="batch")
        settings.set_title(f"Settings of epsilon {target_epsilon:g}", loc="left")
        where.set_title("Full batch pays where a curve still falls", loc="left")
        by_rounds.set_title("Epsilon at one noise on the mean", loc="left")
        by_batch.set_title("Epsilon at one noise on the mean", loc="left")
        counts = " ".join(f"{point.rounds:,}" for point in noisier[:1])
        by_noise.set_title(f"Epsilon at {counts} rounds", loc="left")
        legends.axis("off")
        batch_legend = settings.get_legend_handles_labels()
        legends.add_artist(legends.legend(*batch_legend, title="batch", loc="upper left"))
        legends.legend(*where.get_legend_handles_labels(), title="rounds", loc="upper right")

    return as_svg(draw, (8.4, 9.6))
