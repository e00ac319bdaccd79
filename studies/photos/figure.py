"""Draws the gain on photos against users, from the tables in README.md.

python -m studies.photos.figure docs/images/cars.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from fedemb.foundation.files import write_bytes
from fedemb.reports.charts import SERIES, SOFT, figure_svg, new_figure
from studies.shared import standalone

ALT = (
    "Gain over the public features on photos of unseen classes, recall at a false accept rate of 1 "
    "in 100, against the users who need that noise at epsilon 8: three dots with intervals for the "
    "three seeds of each noise"
)
METHODS = ("cars, covariance", "groceries, covariance", "cars, projection")
_ROW = re.compile(
    r"^\| (cars|groceries), (covariance|projection) \| [\d.]+ \| ([\d,]+) \| [^|]+ \| ([^|]+) \|",
    re.M,
)
_GAIN = re.compile(r"([+-][.\d]+) \[([+-][.\d]+), ([+-][.\d]+)\]")


class Row(NamedTuple):
    """One noise of one method."""

    users: int
    """Users who need this noise at epsilon 8."""
    seeds: list[tuple[float, ...]]
    """Gain, lower and upper limit of each seed."""


def gains() -> dict[str, list[Row]]:
    """Returns the rows of each method."""
    table = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    found: dict[str, list[Row]] = {method: [] for method in METHODS}
    for photos, method, users, cell in _ROW.findall(table):
        seeds = [tuple(map(float, numbers)) for numbers in _GAIN.findall(cell)]
        found[f"{photos}, {method}"].append(Row(int(users.replace(",", "")), seeds))
    return found


def figure() -> Markup:
    """Returns the chart: a mark with its interval per seed, side by side."""
    drawing = new_figure(7.4, 3.6)
    axes = drawing.axes[0]
    for number, (method, rows) in enumerate(gains().items()):
        for row in rows:
            for seed, (value, low, high) in enumerate(row.seeds):
                x = row.users * 1.06 ** (seed - 1 + 4 * (number - 1))
                axes.vlines(x, low, high, color=SERIES[number], linewidth=1.4)
                axes.plot([x], [value], color=SERIES[number], marker="o", markersize=4)
        axes.plot([], [], color=SERIES[number], marker="o", label=method)
    axes.set_xscale("log")
    axes.axhline(0, color=SOFT, linewidth=1)
    axes.set_xlabel("users that the noise needs at epsilon 8, delta 1e-5; three dots: three seeds")
    axes.set_ylabel("gain in recall at FAR 1 in 100")
    axes.legend(loc="upper left", frameon=False)
    return figure_svg(drawing, ALT)


if __name__ == "__main__":
    write_bytes(Path(sys.argv[1]), standalone(figure()))
