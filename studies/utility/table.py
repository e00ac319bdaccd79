"""Rows with one seed each become lines of a table: means, intervals, paired differences, price.

Intervals are over groups (alphabets), then the people inside them: what to expect of alphabets that
are not here. All rows meet the same people in every bootstrap draw, so draws of a mean over seeds
are means of the draws, and differences are paired. The spread is over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from studies.utility.certify import POPULATIONS
from studies.utility.rows import CENTRALIZED, METHODS, Method, Net, Row

Result = Mapping[str, Any]
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
LARGEST_STATED = 16
"""Larger epsilons are not stated: about there the noise sampler's share uses up delta."""
PRICE_HEADER = ("method", "noise", "epsilon at 1e5 users", "at 1e6", "at 1e7")
CONTEST_HEADER = ("net", "method", "noise", "recipe", "recall@FAR=1e-3")
ABLATION_HEADER = ("what is changed", "recall@FAR=1e-3", "@1e-2", "1-NN", "against unchanged")


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
      seeds: seeds that are there.
      recall: at the first false accept rate, mean over seeds.
      second: recall at the second rate, mean over seeds.
      spread: standard deviation over seeds of `recall`; None for one seed.
      nearest_neighbour: mean over seeds.
      relative: recall / that of the stronger centralized training of the same net, less 1; None
        without, and for that one itself.
      gain: recall less that of the public backbone of the same net; None without.
      seconds: mean over seeds.
      certificates: what this noise costs, per population.
    """

    net: Net
    method: Method
    noise: float
    seeds: tuple[int, ...]
    recall: Interval
    second: float
    spread: float | None
    nearest_neighbour: float
    relative: Interval | None
    gain: Interval | None
    seconds: float
    certificates: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """For people."""
        return METHODS[self.method]

    def to_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return {**asdict(self), "name": self.name, "certificates": list(self.certificates)}


BySeed = Mapping[int, Result]
Key = tuple[Net, Method, float]


def summarise(
    found: Iterable[tuple[Row, Result]],
    certificates: Mapping[tuple[str, float], Sequence[Mapping[str, Any]]],
) -> list[Line]:
    """Groups results by net, method and noise, in the order they come.

    Args:
      found: rows of one stage with their results.
      certificates: per method and noise.
    """
    groups: dict[Key, dict[int, Result]] = {}
    for row, result in found:
        groups.setdefault((row.net, row.method, row.noise), {})[row.seed] = result
    lines = []
    for (net, method, noise), by_seed in groups.items():
        results = list(by_seed.values())
        headline = np.array([_headline(result) for result in results])
        strongest = _strongest(groups, net)
        public = groups.get((net, "public_only", 0.0), {})
        lines.append(
            Line(
                net=net,
                method=method,
                noise=noise,
                seeds=tuple(sorted(by_seed)),
                recall=_interval(float(headline.mean()), _draws(by_seed, sorted(by_seed))),
                second=float(np.mean([list(r["recall"].values())[1] for r in results])),
                spread=float(headline.std(ddof=1)) if len(results) > 1 else None,
                nearest_neighbour=float(np.mean([r["nearest_neighbour"] for r in results])),
                relative=None if by_seed is strongest else _relative(by_seed, strongest),
                gain=None if method == "public_only" else _gain(by_seed, public),
                seconds=float(np.mean([r["seconds"] for r in results])),
                certificates=certificates.get((method, noise), ()),
            )
        )
    return lines


def _strongest(groups: Mapping[Key, BySeed], net: Net) -> BySeed:
    """The centralized training of a net with the highest mean recall."""
    there = [groups[net, method, 0.0] for method in CENTRALIZED if (net, method, 0.0) in groups]
    return max(there, key=lambda seeds: np.mean([_headline(r) for r in seeds.values()]), default={})


def _headline(result: Result) -> float:
    return next(iter(result["recall"].values()))


def _draws(by_seed: BySeed, seeds: Sequence[int]) -> np.ndarray:
    return np.mean([by_seed[seed]["draws"] for seed in seeds], axis=0)


def _interval(value: float, draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(value, float(low), float(high))


def _gain(by_seed: BySeed, public: BySeed) -> Interval | None:
    """Mean paired gain over the seeds both have."""
    shared = sorted(by_seed.keys() & public.keys())
    if not shared:
        return None
    value = float(np.mean([_headline(by_seed[s]) - _headline(public[s]) for s in shared]))
    return _interval(value, _draws(by_seed, shared) - _draws(public, shared))


def _relative(by_seed: BySeed, other: BySeed) -> Interval | None:
    """Mean recall over the seeds both have as a share of the other's, less 1."""
    shared = sorted(by_seed.keys() & other.keys())
    if not shared:
        return None
    ours, theirs = (sum(_headline(found[s]) for s in shared) for found in (by_seed, other))
    return _interval(ours / theirs - 1, _draws(by_seed, shared) / _draws(other, shared) - 1)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def contest_cells(
    contests: Iterable[tuple[Sequence[Row], Row | None]], recall: Mapping[Row, float]
) -> list[tuple[str, ...]]:
    """A row of cells per recipe that was tried, as in `CONTEST_HEADER`; the chosen one says so.

    Args:
      contests: tries, and the one that won or None.
      recall: of the tries that have run.
    """
    return [
        (
            row.net,
            METHODS[row.method],
            f"{row.noise:g}" if row.noise else "-",
            row.label,
            f"{recall[row]:.3f}{', chosen' if row is won else ''}",
        )
        for tries, won in contests
        for row in tries
        if row in recall
    ]


def ablation_cells(found: Sequence[tuple[Row, Result]]) -> list[tuple[str, ...]]:
    """A row of cells per ablation, each against the first one, the unchanged recipe."""
    rows, reference = [], _headline(found[0][1]) if found else 0.0
    for row, result in found:
        recall = list(result["recall"].values())
        rows.append(
            (
                row.label,
                *(f"{value:.3f}" for value in recall),
                f"{result['nearest_neighbour']:.3f}",
                f"{recall[0] - reference:+.3f}",
            )
        )
    return rows


def cells(line: Line) -> tuple[str, ...]:
    """The cells of a line, as in `HEADER`."""
    spread = "" if line.spread is None else f" ± {line.spread:.3f}"
    relative = "-"
    if line.relative is not None:
        value, low, high = (100 * part for part in line.relative)
        relative = f"{value:+z.0f} % [{low:+z.0f}, {high:+z.0f}]"
    gain = "-"
    if line.gain is not None:
        gain = f"{line.gain.value:+.3f} [{line.gain.low:+.3f}, {line.gain.high:+.3f}]"
    return (
        line.net,
        line.name,
        f"{line.noise:g}" if line.noise else "-",
        str(len(line.seeds)),
        f"{line.recall.value:.3f}{spread} [{line.recall.low:.2f}, {line.recall.high:.2f}]",
        f"{line.second:.3f}",
        f"{line.nearest_neighbour:.3f}",
        relative,
        gain,
    )


def price_cells(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """A row of cells per noise of every mechanism, as in `PRICE_HEADER`; equal rows are joined."""
    names: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        if line.certificates:
            found = {one["population"]: one for one in line.certificates}
            prices = (f"{line.noise:g}", *(_price(found.get(people)) for people in POPULATIONS))
            joined = names.setdefault(prices, [])
            joined += [] if line.name in joined else [line.name]
    return [(", ".join(name), *prices) for prices, name in names.items()]


def _price(one: Mapping[str, Any] | None) -> str:
    """Epsilon and images; a dash where it is so large that it says nothing, or none was found."""
    if one is None or one["epsilon"] > LARGEST_STATED:
        return "-"
    return f"{one['epsilon']:.2g} ({one['examples']:.0e})".replace("e+0", "e").replace("e+", "e")
