"""Text that `plan`, `frontier` and `extrapolate` print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedemb.reports.mechanism_text import participants
from fedemb.reports.privacy_report_words import BACKENDS

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

PROTECTS_UP_TO = 20.0
"""Largest epsilon without a warning."""


def lines(fields: dict[str, Any], plan: MechanismPlan) -> list[str]:
    """Returns the fields of `fedemb plan --json` as lines of text."""
    out = [fields["sentence"], ""]
    out.append(f"{plan.kind}: noise multiplier {plan.noise_multiplier:.4g}, {participants(plan)}")
    out.append(f"  gradients by {BACKENDS[fields['backend']]}")
    # At very much noise the grid of PLD costs more than the bound by Renyi divergences.
    renyi, epsilon = fields["epsilon_rdp"], fields["epsilon"]
    looser = renyi is not None and epsilon is not None and renyi > epsilon
    named = {
        "epsilon_rdp": "epsilon by the Renyi accountant" + ", looser" * looser,
        "zcdp_rho": "zCDP rho",
    }
    if fields["epsilon_conservative_2c"] != fields["epsilon"]:
        named = {
            "epsilon_conservative_2c": "epsilon if users are sampled before they are grouped (2C)"
        } | named
    for name, words in named.items():
        if fields[name] is not None:
            out.append(f"  {words}: {fields[name]:.4g}")
    for other in fields["comparisons"]:
        epsilon = "infinite" if other["epsilon"] is None else f"{other['epsilon']:.4g}"
        out.append(f"  {other['words']}: {epsilon}")
    if series := fields["series"]:
        together, cap = series["epsilon"], series["cap"]
        price = "more than can be priced" if together is None else f"epsilon {together:.4g}"
        fits = together is not None and together <= cap
        out.append(
            f"  all {series['runs']} planned runs together: {price}, "
            + (
                f"within the cap {cap:g}"
                if fits
                else f"above the cap {cap:g}: some runs would be refused"
            )
        )
    for item in fields["projections"]:
        epsilon = item["epsilon"]
        out.append(
            f"projection, not a guarantee: simulated at {item['simulated_at']:,} users, for "
            f"{item['population']:,} users with {item['clients_per_round']:.4g} clients a round and"
            f" noise multiplier {item['noise_multiplier']:.4g} epsilon would be "
            + ("infinite" if epsilon is None else f"{epsilon:.4g} at delta {item['delta']:.2g}")
        )
    if "tuning" in fields:
        out += ["", f"search: {fields['tuning']['sentence']}", "valid only if"]
        out += [f"  - {text}" for text in fields["tuning"]["conditions"]]
    for paragraph in fields.get("explanation", []):
        out += ["", paragraph]
    if "extrapolation" in fields:
        out += ["", *_table(fields["extrapolation"])]
    if "frontier" in fields:
        out += ["", *_frontier(fields["frontier"])]
    if "simulation" in fields:
        found = fields["simulation"]
        out += ["", f"simulation at {found['share']}: {', '.join(found['settings'])}"]
        out.append(f"  {found['sentence']}")
    out += [f"warning: {text}" for text in [*fields["warnings"], *_useless(fields, plan)]]
    return out if fields["plan"] is None else [*out, "", f"wrote {fields['plan']}"]


def _useless(fields: dict[str, Any], plan: MechanismPlan) -> list[str]:
    epsilon = fields["epsilon"]
    if not plan.private:
        return [
            "the mechanism adds no noise and has no guarantee. Use it for baselines only; the gate "
            "denies it."
        ]
    if epsilon is not None and epsilon <= PROTECTS_UP_TO:
        return []
    return [
        f"epsilon {'is infinite' if epsilon is None else f'is {epsilon:.4g}'}, which protects no "
        "user. Use more noise (pass --target-epsilon), fewer rounds or more users"
        + (", or a larger delta." if epsilon is None else ".")
    ]


def _frontier(frontier: dict[str, Any]) -> list[str]:
    out = [f"settings of epsilon {frontier['target_epsilon']:g} with the smallest noise:"]
    timed = any(point["minutes"] is not None for point in frontier["points"])
    out.append(
        f"{'batch':>10}{'rounds':>10}{'noise':>10}{'noise/batch':>14}{'epochs':>10}"
        + f"{'minutes':>10}" * timed
    )
    for point in frontier["points"]:
        mark = "  full batch" if point["full_batch"] else ""
        minutes = f"{point['minutes']:>10.3g}" if timed else ""
        out.append(
            f"{point['batch']:>10,}{point['rounds']:>10,}{point['noise_multiplier']:>10.4g}"
            f"{point['noise_per_batch']:>14.3g}{point['epochs']:>10.4g}{minutes}{mark}"
        )
    for gain in frontier["full_batch"]:
        less = 1 - gain["noise"]
        out.append(
            f"{gain['rounds']:,} rounds: "
            + (
                f"full batch has {less:.1%} less noise on the mean than batch "
                f"{gain['smallest_batch']:,}, for {gain['work']:.3g} times the units"
                if gain["work"] > 1
                else "full batch is worth its cost: smaller batches have over 5 % more noise"
            )
        )
    return [*out, f"wrote {frontier['figure']}"]


def _table(extrapolation: dict[str, Any]) -> list[str]:
    out = [
        "Projections, not guarantees. Epsilon is an upper bound at delta = users ** -1.1, within",
        "0.1 % of the exact value. Correlated noise (tree, BLT) is scaled so that running sums of",
        "updates are as noisy as with independent noise.",
    ]
    for axis, title in (
        ("population", "more users, compute and noise as planned"),
        ("compute", "more compute, same noise on the mean"),
    ):
        out += ["", f"{title}:", *_rows(extrapolation[axis])]
    return [*out, f"wrote {extrapolation['figure']}"]


def _rows(points: list[dict[str, Any]]) -> list[str]:
    """Returns one line per cohort with one column per mechanism; a dash if it cannot run."""
    kinds = list(dict.fromkeys(point["mechanism"] for point in points))
    cohorts = dict.fromkeys((point["population"], point["clients_per_round"]) for point in points)
    at = {
        (point["population"], point["clients_per_round"], point["mechanism"]): point
        for point in points
    }
    out = [f"{'users':>15}{'clients/round':>15}" + "".join(f"{kind:>24}" for kind in kinds)]
    for users, clients in cohorts:
        cells = [_cell(at.get((users, clients, kind))) for kind in kinds]
        out.append(f"{users:>15,}{clients:>15,}" + "".join(f"{cell:>24}" for cell in cells))
    return out


def _cell(point: dict[str, Any] | None) -> str:
    if point is None:
        return "-"
    return f"{point['epsilon']:#.3g} (noise {point['noise_multiplier']:.3g})"
