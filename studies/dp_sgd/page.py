"""Tables and pictures of the study, in Markdown for the specification."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedemb.foundation.files import write_bytes
from fedemb.reports.charts import Axis, Line, line_chart
from studies.dp_sgd.grid import HELD_OUT, TITLES, TRAIN, Part, Row
from studies.utility.page import standalone

Results = Mapping[Row, Mapping[str, Any]]
AXES: dict[Part, tuple[str, str]] = {
    "samplers": ("noise multiplier", "epsilon"),
    "squares": ("epsilon", "accuracy"),
    "noise": ("rounds", "accuracy"),
    "layers": ("epsilon", "accuracy"),
    "units": ("epsilon", "accuracy"),
    "ladder": ("step", "accuracy"),
}
SAID: dict[Part, str] = {
    "samplers": "Ten passes of ten batches each, at delta 1e-5. Shuffled passes have no "
    "amplification: each unit is in one round of each pass, and the round counts as public. Chua "
    "et al. (arXiv 2403.17673) prove that shuffling costs more than Poisson sampling. A shuffled "
    "training that reports the price of Poisson sampling is wrong by up to the difference.",
    "squares": "Both use the same features of a ResNet-8 of 78,000 weights that trained for four "
    "passes on 20,000 images of Tiny-ImageNet.",
    "noise": "A linear head on scattering features without public data, with the better of two "
    "learning rates. Each point costs epsilon 3: fewer rounds need less noise per round. The rows "
    "of 1,280 rounds were added after the others had been read.",
    "layers": "From the public backbone above. All layers: batch 1,024, 60 rounds.",
    "units": "3,000 writers of glyphs with four images each, and the same expected number of "
    "images a round.",
    "ladder": "ResNet-8 of 78,000 weights instead of WRN-40-4, 250 rounds. Batch and noise are a "
    "sixteenth of a run of epsilon 8 on 50,000 images. The noise on the mean is that of the run, "
    "and the results are not private.",
}


def write_page(folder: Path, results: Results, missing: int) -> None:
    """Writes `dp_sgd_study.md`, and one SVG in `images/` for each part with a curve.

    Args:
      folder: where to.
      results: finished rows.
      missing: rows that are not there yet.
    """
    text = [
        "# Study of DP-SGD",
        "",
        f"Results of `make study-dp-sgd` on {TRAIN:,} training and {HELD_OUT:,} held-out images of "
        "the training half of CIFAR-10 (JPEG). The networks are small, so compare orders and not "
        "levels. The standard error of an accuracy is 0.8 points.",
        "",
        "Settings were fixed in advance, except for the choices that are named. `python -m "
        "studies.dp_sgd --data $FEDEMB_DATA --cache studies/dp_sgd/results --page "
        "studies/dp_sgd/results` writes this page from the rows in "
        "`studies/dp_sgd/results/rows.jsonl`, and runs missing rows.",
        "",
    ]
    if missing:
        text += [f"{missing} rows have not been run.", ""]
    for part, title in TITLES.items():
        of_part = {row: found for row, found in results.items() if row.part == part}
        if not of_part:
            continue
        text += [f"## {title}", "", SAID[part], "", *_table(part, of_part), ""]
        curves = _curves(part, of_part)
        if part != "ladder" and max(len(line.x) for line in curves) > 1:
            name = f"images/dp_sgd_study_{part}.svg"
            write_bytes(folder / name, standalone(_picture(part, title, curves)))
            text += [f"![{title}]({name})", ""]
    write_bytes(folder / "dp_sgd_study.md", "\n".join(text).encode())


def _values(results: Results) -> dict[tuple[str, float], list[float]]:
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for row, result in results.items():
        found[row.name, row.at].append(float(result["value"]))
    return found


def _table(part: Part, results: Results) -> list[str]:
    """Names down, places on the axis across; means over seeds."""
    values = _values(results)
    if part == "ladder":
        lines = [f"| {name} | {_shown(part, values[name, at])} |" for name, at in values]
        return ["| each row adds one change | accuracy |", "|---|---|", *lines]
    places = sorted({at for _, at in values})
    head = f"| {AXES[part][0]} | " + " | ".join(f"{at:g}" for at in places) + " |"
    shown = {
        name: [_shown(part, values.get((name, at), [])) for at in places]
        for name in dict.fromkeys(name for name, _ in values)
    }
    body = [f"| {name} | {' | '.join(cells)} |" for name, cells in shown.items()]
    return [head, "|---" * (len(places) + 1) + "|", *body]


def _shown(part: Part, values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    if part == "samplers":
        return f"{mean:.3g}"
    spread = f" ({len(values)} seeds)" if len(values) > 1 else ""
    return f"{100 * mean:.1f}{spread}"


def _curves(part: Part, results: Results) -> list[Line]:
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (name, at), found in _values(results).items():
        curves[name].append((at, sum(found) / len(found)))
    return [
        Line(name, [at for at, _ in sorted(points)], [value for _, value in sorted(points)])
        for name, points in curves.items()
    ]


def _picture(part: Part, title: str, curves: Sequence[Line]) -> str:
    x, y = AXES[part]
    places = sorted({place for line in curves for place in line.x})
    return line_chart(
        curves,
        x=Axis(x, log=True, ticks=[(place, f"{place:g}") for place in places]),
        y=Axis(y, log=part == "samplers"),
        alt=title,
    )
