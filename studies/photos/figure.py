"""Draws the gain on car photos against the noise, from the table in README.md.

python -m studies.photos.figure docs/images/cars.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from markupsafe import Markup

from fedemb.foundation.files import write_bytes
from fedemb.reports.charts import SERIES, SOFT, figure_svg, new_figure
from studies.utility.page import standalone

ALT = (
    "Gain over the public features on photos of unseen cars: recall at a false accept rate of 1 in "
    "100, and nearest neighbour, at noise 0.01 and 0.03, three seeds each, with intervals"
)
USERS = {"0.01": "35,000", "0.03": "12,000"}
"""Noise on the mean -> users who need that noise at epsilon 8, delta 1e-5."""
MEASURES = ("recall at 1e-2", "nearest neighbour")
_ROW = re.compile(r"^\| (0\.0[13]), learning rate [\d.]+ \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", re.M)
_GAIN = re.compile(r"\+([.\d]+) \[([.\d]+), ([.\d]+)\]")


def gains() -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """Returns `(noise, measure)` -> gain, lower and upper limit of each seed."""
    table = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return {
        (noise, measure): [tuple(map(float, found)) for found in _GAIN.findall(cell)]
        for noise, *cells in _ROW.findall(table)
        for measure, cell in zip(MEASURES, cells, strict=True)
    }


def figure() -> Markup:
    """Returns the chart: a row per noise and measure, a mark with its interval per seed."""
    rows = gains()
    drawing = new_figure(7.4, 0.9 + 0.55 * len(rows))
    axes = drawing.axes[0]
    for place, ((_, measure), seeds) in enumerate(rows.items()):
        colour = SERIES[MEASURES.index(measure)]
        for seed, (value, low, high) in enumerate(seeds):
            y = place + 0.22 * (seed - 1)
            axes.hlines(y, low, high, color=colour, linewidth=1.4)
            axes.plot([value], [y], color=colour, marker="o", markersize=5, linestyle="none")
    names = [f"{measure}, noise {noise}\n{USERS[noise]} users" for noise, measure in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.axhline(0, color=SOFT, linewidth=0)
    axes.set_xlabel("gain over the public features, unseen cars, epsilon 8")
    return figure_svg(drawing, ALT)


if __name__ == "__main__":
    write_bytes(Path(sys.argv[1]), standalone(figure()))
