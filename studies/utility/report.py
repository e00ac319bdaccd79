"""Tables and figure of the rows that are there: means, intervals, paired differences.

Intervals are over alphabets, then the people inside them: what to expect of alphabets that are not
here. All rows meet the same people in every bootstrap draw, so draws of a mean over seeds are means
of the draws, and differences are paired. The spread is over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fedemb.foundation.files import write_bytes
from fedemb.reports.charts import SERIES, SOFT, figure_svg, new_figure
from studies.shared import markdown, standalone
from studies.utility.grid import CENTRALIZED, METHODS, NETS, Method, Net, Row
from studies.utility.run import Decided, Result, Study, headline

HEADER = (
    "net",
    "method",
    "noise",
    "seeds",
    "recall@FAR=1e-3 [95 %]",
    "@1e-2",
    "1-NN",
    "against the stronger centralized",
    "gain over the public backbone",
)
CONTEST_HEADER = ("net", "method", "noise", "recipe", "recall@FAR=1e-3")
ALT = (
    "Paired gain in recall at false accept rate 1e-3 over the public backbone, by method and net: "
    "mean of three seeds with its interval, and each seed"
)
MARKS = ("o", "s")
BySeed = Mapping[int, Result]
Key = tuple[Net, Method, float]


class Interval(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method at one noise, over its seeds.

    Attributes:
      net: backbone.
      method: key of `METHODS`.
      noise: standard deviation of the noise on the mean / clip; 0 without.
      results: by seed.
      recall: at the first false accept rate, mean over seeds.
      relative: recall / that of the stronger centralized training of the same net, less 1; None
        without, and for that one itself.
      gain: recall less that of the public backbone of the same net; None without.
      seed_gains: the same for each seed that both have.
    """

    net: Net
    method: Method
    noise: float
    results: BySeed
    recall: Interval
    relative: Interval | None
    gain: Interval | None
    seed_gains: Sequence[float]

    @property
    def name(self) -> str:
        """For people."""
        return METHODS[self.method]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the line, as in `HEADER`."""
        results, recall, relative, gain = self.results.values(), self.recall, "-", "-"
        seeds = [headline(result) for result in results]
        spread = f" ± {np.std(seeds, ddof=1):.3f}" if len(seeds) > 1 else ""
        if self.relative is not None:
            value, low, high = (100 * part for part in self.relative)
            relative = f"{value:+z.0f} % [{low:+z.0f}, {high:+z.0f}]"
        if self.gain is not None:
            gain = f"{self.gain.value:+.3f} [{self.gain.low:+.3f}, {self.gain.high:+.3f}]"
        return (
            self.net,
            self.name,
            f"{self.noise:g}" if self.noise else "-",
            str(len(seeds)),
            f"{recall.value:.3f}{spread} [{recall.low:.2f}, {recall.high:.2f}]",
            f"{np.mean([list(r['recall'].values())[1] for r in results]):.3f}",
            f"{np.mean([r['nearest_neighbour'] for r in results]):.3f}",
            relative,
            gain,
        )


def summarise(found: Iterable[tuple[Row, Result]]) -> list[Line]:
    """Groups results of one stage by net, method and noise, in the order they come."""
    groups: dict[Key, dict[int, Result]] = {}
    for row, result in found:
        groups.setdefault((row.net, row.method, row.noise), {})[row.seed] = result
    lines = []
    for (net, method, noise), by_seed in groups.items():
        central = [groups[net, name, 0.0] for name in CENTRALIZED if (net, name, 0.0) in groups]
        strongest = max(central, key=lambda found: _mean(found, found), default={})
        relative = None if by_seed is strongest else _paired(by_seed, strongest, ratio=True)
        public = {} if method == "public_only" else groups.get((net, "public_only", 0.0), {})
        lines.append(
            Line(
                net=net,
                method=method,
                noise=noise,
                results=by_seed,
                recall=_interval(_mean(by_seed, by_seed), _draws(by_seed, by_seed)),
                relative=relative,
                gain=_paired(by_seed, public, ratio=False),
                seed_gains=[
                    headline(by_seed[seed]) - headline(public[seed])
                    for seed in sorted(by_seed.keys() & public.keys())
                ],
            )
        )
    return lines


def _mean(by_seed: BySeed, seeds: Iterable[int]) -> float:
    return float(np.mean([headline(by_seed[seed]) for seed in seeds]))


def _draws(by_seed: BySeed, seeds: Iterable[int]) -> np.ndarray:
    return np.mean([by_seed[seed]["draws"] for seed in seeds], axis=0)


def _interval(value: float, draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _paired(by_seed: BySeed, other: BySeed, *, ratio: bool) -> Interval | None:
    """Mean over the seeds both have, less that of the other, or as a share of it less 1."""
    shared = sorted(by_seed.keys() & other.keys())
    if not shared:
        return None
    ours, theirs = ((_mean(one, shared), _draws(one, shared)) for one in (by_seed, other))
    if ratio:
        return _interval(ours[0] / theirs[0] - 1, ours[1] / theirs[1] - 1)
    return _interval(ours[0] - theirs[0], ours[1] - theirs[1])


def write_report(study: Study, decided: Decided) -> list[str]:
    """Writes `study.md` and `study.svg` into the cache folder, and returns the lines to print.

    Args:
      study: what and where.
      decided: contests and rows; what has no result yet is left out.
    """
    lines = summarise(study.results(decided.final))
    recall = study.recall(row for contest, _ in decided.contests for row in contest.tries)
    tried = [
        (
            row.net,
            METHODS[row.method],
            f"{row.noise:g}" if row.noise else "-",
            row.label,
            f"{recall[row]:.3f}{', chosen' if row is won else ''}",
        )
        for contest, won in decided.contests
        for row in contest.tries
        if row in recall
    ]
    text = [*markdown(CONTEST_HEADER, tried), ""]
    if lines:
        text += [*markdown(HEADER, [line.cells for line in lines]), ""]
        write_bytes(study.cache / "study.svg", standalone(figure(lines)))
    write_bytes(study.cache / "study.md", "\n".join(text).encode())
    return [*text, f"report: {study.cache / 'study.md'}"]


def figure(lines: Sequence[Line]) -> Markup:
    """Gain over the public backbone: a row per method and noise, a mark per net, a dot per seed."""
    trained = [(line, line.gain) for line in lines if line.gain and line.method != "untrained"]
    rows: list[tuple[Method, float]] = list(
        dict.fromkeys((line.method, line.noise) for line, _ in trained)
    )
    drawing = new_figure(7.4, 0.9 + 0.46 * len(rows))
    axes = drawing.axes[0]
    axes.axvline(0, color=SOFT, linewidth=1)
    for position, net in enumerate(NETS):
        color, mark = SERIES[position], MARKS[position]
        axes.plot([], [], linestyle="none", markersize=5.5, color=color, marker=mark, label=net)
        for line, gain in trained:
            if line.net == net:
                y = rows.index((line.method, line.noise)) + 0.3 * position - 0.15
                axes.hlines(y, gain.low, gain.high, color=color, linewidth=1.4)
                axes.plot([gain.value], [y], markersize=5.5, color=color, marker=mark)
                seeds = line.seed_gains
                axes.plot(seeds, [y + 0.11] * len(seeds), "|", markersize=4, color=color)
    names = [f"{METHODS[m]}, noise {noise:g}" if noise else METHODS[m] for m, noise in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("gain in recall at FAR 1e-3 over the public backbone, paired; ticks: seeds")
    axes.legend(loc="lower right", fontsize=8.5, frameon=False)
    return figure_svg(drawing, ALT)
