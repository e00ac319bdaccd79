"""Rows with one seed each become lines of a table: means, spread, paired gain, price.

The interval of a gain is over people: all seeds meet the same people in every bootstrap draw, so
draws of the mean over seeds are means of the draws. The spread is over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from studies.utility.certify import POPULATIONS
from studies.utility.rows import METHODS, Row

Result = Mapping[str, Any]
HEADER = (
    "method",
    "noise",
    "seeds",
    "recall@FAR=1e-3",
    "@1e-2",
    "1-NN",
    "against centralized",
    "gain over public [95 %]",
)
LARGEST_STATED = 16
"""Larger epsilons are not stated: about there the noise sampler's share uses up delta."""
PRICE_HEADER = ("method", "noise", "epsilon at 1e5 users", "at 1e6", "at 1e7")
ABLATION_HEADER = ("what is changed", "recall@FAR=1e-3", "@1e-2", "1-NN", "against unchanged")


@dataclass(frozen=True)
class Line:
    """One method at one noise, over its seeds.

    Attributes:
      method: key of `METHODS`.
      noise: standard deviation of the noise on the mean / clip; 0 without.
      seeds: seeds that are there.
      recall: per false accept rate, mean over seeds.
      spread: standard deviation over seeds of the first recall; None for one seed.
      nearest_neighbour: mean over seeds.
      relative: recall / recall of centralized - 1; None without centralized rows.
      gain: first recall less that of public only, mean over shared seeds; None without.
      gain_low: 2.5 % quantile of the gain over people.
      gain_high: 97.5 % quantile.
      seconds: mean over seeds.
      certificates: what this noise costs, per population.
    """

    method: str
    noise: float
    seeds: tuple[int, ...]
    recall: dict[str, float]
    spread: float | None
    nearest_neighbour: float
    relative: float | None
    gain: float | None
    gain_low: float | None
    gain_high: float | None
    seconds: float
    certificates: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """For people."""
        if self.method == "fedemb" and not self.noise:
            return "FedEmb, not private"
        return METHODS[self.method]  # pyright: ignore[reportArgumentType]

    def to_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return {**asdict(self), "name": self.name, "certificates": list(self.certificates)}


def summarise(
    found: Iterable[tuple[Row, Result]],
    certificates: Mapping[tuple[str, float], Sequence[Mapping[str, Any]]],
) -> list[Line]:
    """Groups results by method and noise, in the order they come.

    Args:
      found: rows of one stage with their results.
      certificates: per method and noise.
    """
    groups: dict[tuple[str, float], dict[int, Result]] = {}
    for row, result in found:
        groups.setdefault((row.method, row.noise), {})[row.seed] = result
    public = groups.get(("public_only", 0.0), {})
    central = groups.get(("centralized", 0.0), {})
    reference = float(np.mean([_headline(r) for r in central.values()])) if central else None
    lines = []
    for (method, noise), by_seed in groups.items():
        results = list(by_seed.values())
        headline = np.array([_headline(result) for result in results])
        gain = _gain(by_seed, public) if method != "public_only" else (None, None, None)
        lines.append(
            Line(
                method=method,
                noise=noise,
                seeds=tuple(sorted(by_seed)),
                recall={
                    rate: float(np.mean([r["recall"][rate] for r in results]))
                    for rate in results[0]["recall"]
                },
                spread=float(headline.std(ddof=1)) if len(results) > 1 else None,
                nearest_neighbour=float(np.mean([r["nearest_neighbour"] for r in results])),
                relative=None if not reference else float(headline.mean() / reference - 1),
                gain=gain[0],
                gain_low=gain[1],
                gain_high=gain[2],
                seconds=float(np.mean([r["seconds"] for r in results])),
                certificates=certificates.get((method, noise), ()),
            )
        )
    return lines


def _headline(result: Result) -> float:
    return next(iter(result["recall"].values()))


def _gain(
    by_seed: Mapping[int, Result], public: Mapping[int, Result]
) -> tuple[float | None, float | None, float | None]:
    """Mean paired gain over the seeds both have, with its interval over people."""
    shared = sorted(by_seed.keys() & public.keys())
    if not shared:
        return None, None, None
    value = float(np.mean([_headline(by_seed[s]) - _headline(public[s]) for s in shared]))
    draws = np.mean([np.subtract(by_seed[s]["draws"], public[s]["draws"]) for s in shared], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    return value, float(low), float(high)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


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
    recall = list(line.recall.values())
    spread = "" if line.spread is None else f" ± {line.spread:.3f}"
    gain = "-"
    if line.gain is not None:
        gain = f"{line.gain:+.3f} [{line.gain_low:+.2f}, {line.gain_high:+.2f}]"
    return (
        line.name,
        f"{line.noise:g}" if line.noise else "-",
        str(len(line.seeds)),
        f"{recall[0]:.3f}{spread}",
        *(f"{value:.3f}" for value in recall[1:]),
        f"{line.nearest_neighbour:.3f}",
        "-" if line.relative is None else f"{100 * line.relative:+.0f} %",
        gain,
    )


def price_cells(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """A row of cells per noise of every mechanism, as in `PRICE_HEADER`; equal rows are joined."""
    names: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        if line.certificates:
            found = {one["population"]: one for one in line.certificates}
            prices = (f"{line.noise:g}", *(_price(found.get(people)) for people in POPULATIONS))
            names.setdefault(prices, []).append(line.name)
    return [(", ".join(name), *prices) for prices, name in names.items()]


def _price(one: Mapping[str, Any] | None) -> str:
    """Epsilon and images; a dash where it is so large that it says nothing, or none was found."""
    if one is None or one["epsilon"] > LARGEST_STATED:
        return "-"
    return f"{one['epsilon']:.2g} ({one['examples']:.0e})".replace("e+0", "e").replace("e+", "e")
