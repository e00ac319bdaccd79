"""What `fedemb plan` prints for people."""

from __future__ import annotations

from typing import Any

_USELESS = 20.0
"""Epsilon above which a plan is called what it is."""


def lines(fields: dict[str, Any]) -> list[str]:
    """The fields of `fedemb plan --json` as lines of text."""
    out = [fields["sentence"], ""]
    out.append(
        f"{fields['mechanism']}: noise multiplier {fields['noise_multiplier']:.4g}, "
        + _round(fields)
    )
    named = {"epsilon_rdp": "epsilon by the Renyi accountant, looser", "zcdp_rho": "zCDP rho"}
    if fields["mechanism"] == "group_poisson_gaussian":
        # For the others the headline is this figure already.
        named = {"epsilon_conservative_2c": "epsilon if users were sampled first (2C)"} | named
    for name, words in named.items():
        if fields[name] is not None:
            out.append(f"  {words}: {fields[name]:.4g}")
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
    out += [f"warning: {text}" for text in [*fields["warnings"], *_useless(fields)]]
    return [*out, "", f"wrote {fields['plan']}"]


def _round(fields: dict[str, Any]) -> str:
    """Who takes part in a round."""
    clients, q = f"{fields['clients_per_round']:.4g}", fields["sampling_probability"]
    if fields["mechanism"] in ("user_poisson", "fixed_size"):
        return f"{clients} virtual clients a round, made of users drawn with probability {q:.4g}"
    of = f"{clients} of {fields['virtual_clients']:,} virtual clients a round"
    return of + (f" (probability {q:.4g})" if q else " in turn")


def _useless(fields: dict[str, Any]) -> list[str]:
    epsilon = fields["epsilon"]
    if fields["mechanism"] == "not_private":
        return ["no noise, no guarantee: for baselines only, no gate passes it"]
    if epsilon is not None and epsilon <= _USELESS:
        return []
    return [
        f"epsilon {'is infinite' if epsilon is None else f'{epsilon:.4g}'}: this protects nobody; "
        "it takes more noise, fewer rounds or far more users (--target-epsilon finds the noise)"
    ]


def _table(extrapolation: dict[str, Any]) -> list[str]:
    out = [
        "Projections, not guarantees: no such run was made. At delta = users ** -1.1 epsilon is",
        "an upper bound, 0.1 % from exact at most; correlated noise (tree, BLT) is scaled until",
        "running sums of updates are as noisy as with independent noise.",
    ]
    for axis, title in (
        ("population", "more users, compute and noise as planned"),
        ("compute", "more compute, same noise on the mean"),
    ):
        out += ["", f"{title}:", *_rows(extrapolation[axis])]
    return [*out, f"wrote {extrapolation['figure']}"]


def _rows(points: list[dict[str, Any]]) -> list[str]:
    """One line per cohort, one column per mechanism; a dash where it cannot run."""
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
