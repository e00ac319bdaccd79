"""`fedemb plan` without a file: a configuration from a handful of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from fedemb.config import RunConfig

_UNCAPPED = 1e9
"""Budget of a plan that is not part of a run."""


def from_numbers(numbers: dict[str, Any]) -> RunConfig:
    """A configuration that holds just what is priced; the rest is the defaults."""
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("population", "clients_per_round", "rounds")
        if numbers[name] is None
    ]
    separately = numbers["virtual_clients"] and numbers["users_lower_bound"]
    if separately and "--population" in missing:
        missing.remove("--population")
    if missing:
        raise ConfigError(f"give {', '.join(missing)}, or --config; see `fedemb plan --help`")
    users, size = numbers["population"], numbers["users_per_client"]
    groups = numbers["virtual_clients"] or max(1, round(users / size))
    if numbers["clients_per_round"] > groups:
        raise ConfigError(
            f"{numbers['clients_per_round']} clients per round exceed the {groups} virtual clients;"
            " lower --clients-per-round or --users-per-client"
        )
    bound = numbers["users_lower_bound"] or users
    delta = numbers["delta"] if numbers["delta"] is not None else float(bound**-1.1)
    from fedemb.pipelines.run.load_config import validate

    return validate(
        {
            "purpose": "simulation",
            "data": {"source": {"uri": "builtin"}},
            "partition": {"virtual_clients": groups},
            "mechanism": _mechanism(numbers, groups, users or bound),
            "policy": {
                "users_lower_bound": bound,
                "certify_at": numbers["certify_at"],
                "delta": delta,
                "epsilon_cap": _UNCAPPED,
            },
        }
    )


def _mechanism(numbers: dict[str, Any], groups: int, users: int) -> dict[str, Any]:
    from fedemb.privacy.planning.extrapolation import cyclic_participation

    kind, clients, rounds = (
        numbers["mechanism"],
        numbers["clients_per_round"],
        numbers["rounds"],
    )
    out: dict[str, Any] = {"kind": kind, "rounds": rounds}
    if kind != "not_private":
        noise = numbers["noise_multiplier"]
        out["noise_multiplier"] = 1.0 if noise is None else noise
    if kind in ("group_poisson_gaussian", "not_private"):
        out["sampling_probability"] = clients / groups
        return out
    out["clients_per_round"] = clients
    if kind == "user_poisson":
        out["sampling_probability"] = clients * numbers["users_per_client"] / users
    elif kind == "fixed_size":
        out["users_per_client"] = numbers["users_per_client"]
    else:
        separation, most = cyclic_participation(groups, clients, rounds)
        out["min_separation"] = numbers["min_separation"] or separation
        out["max_participations"] = numbers["max_participations"] or most
        out |= (
            {"restart_every": numbers["restart_every"]}
            if kind == "tree_aggregation"
            else {"buffers": numbers["buffers"]}
        )
    return out
