"""The plain sentences of the utility report."""

from __future__ import annotations

from typing import Any

COVERS = (
    "The privacy guarantee covers training users only. The figures are exact, without noise, on "
    "evaluation users, who never trained and whom it does not cover."
)


def _points(estimate: dict[str, float]) -> str:
    low, high = sorted((abs(estimate["low"]), abs(estimate["high"])))
    return f"{100 * abs(estimate['value']):.1f} points [{100 * low:.1f}, {100 * high:.1f}]"


def compared(difference: dict[str, float], than: str) -> str:
    """Says a paired difference in words; only an interval without zero is called a difference."""
    if difference["low"] > 0:
        return f"{_points(difference)} more than {than}"
    if difference["high"] < 0:
        return f"{_points(difference)} less than {than}"
    return (
        f"not distinguishable from {than} "
        f"({100 * difference['value']:+.1f} points [{100 * difference['low']:+.1f}, "
        f"{100 * difference['high']:+.1f}])"
    )


def _rate(rate: str) -> str:
    share = 1 / float(rate)
    return (
        f"1 in {share:,.0f}" if abs(share - round(share)) < 1e-6 * share else f"a share of {rate}"
    )


def utility_sentence(report: dict[str, Any]) -> str:
    """One sentence: headline recall with interval, compared with where training started."""
    if not report["measured"]:
        return (
            "Utility could not be measured: the held-out users give no pair of images of one "
            "identity and of two; hold out more users (partition.evaluation)."
        )
    rate, recall = next(iter(report["recall_at_far"].items()))
    identities = report["evaluated"]["identities"]
    text = (
        f"On {identities:,} identities that never trained, the model recognises "
        f"{100 * recall['value']:.1f} % [{100 * recall['low']:.1f}, {100 * recall['high']:.1f}] of "
        f"the pairs that belong together while it accepts {_rate(rate)} of the others"
    )
    clauses = []
    if report["public_kind"] == "none":
        start = "an untrained backbone"
    else:
        start = "the public backbone before private training"
    if report["public_backbone"]:
        clauses.append(compared(report["public_backbone"]["difference"][rate], start))
    if report["untrained"]:
        clauses.append(compared(report["untrained"]["difference"][rate], "an untrained backbone"))
    if report["utility_drop"]:
        drop = report["utility_drop"][rate]
        against = {"value": -drop["value"], "low": -drop["high"], "high": -drop["low"]}
        clauses.append(compared(against, "central training without privacy"))
    return text + (": " + ", and ".join(clauses) if clauses else "") + "."
