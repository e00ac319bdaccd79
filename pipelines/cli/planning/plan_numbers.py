"""`fedemb plan` without a file: a configuration from a handful of numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from fedemb.config import RunConfig
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

_UNCAPPED = 1e9
"""Budget of a plan that is not part of a run."""


def from_numbers(mechanism: type[MechanismPlan], numbers: dict[str, Any]) -> RunConfig:
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
    if math.isclose(delta * bound, 1.0, rel_tol=1e-6):
        raise ConfigError(
            f"--delta {delta:g} is 1 / {bound}, as published figures often have it, and a "
            "guarantee needs less: for the published epsilon as a projection pass "
            f"--users-lower-bound {bound - 1} too; for a run of your own --delta {bound**-1.1:.2g}"
        )
    from fedemb.pipelines.run.load_config import validate
    from fedemb.privacy.mechanisms.mechanism import Cohort

    noise = numbers["noise_multiplier"]
    cohort = Cohort(
        population=users or bound,
        users_per_client=size,
        clients_per_round=numbers["clients_per_round"],
        noise_multiplier=1.0 if noise is None else noise,
        rounds=numbers["rounds"],
        virtual_clients=groups,
    )
    columns = {"user_id": None} if numbers["unit"] == "image" else {}
    options = {name: numbers[name] for name in mechanism.options}

    section = mechanism.section
    classifies = (
        section.solves_head or section.samples_images
    )  # and have no price for anything else
    classifier = {
        "task": "classification",
        "model": {"classes": ["a", "b"], "trainable": "head" if section.solves_head else "all"},
        "training": {"algorithm": "dp_sgd", "unit_gradient": {"microbatch": 1}},
    }
    return validate(
        {
            "purpose": "simulation",
            **(classifier if classifies else {}),
            "data": {"source": {"uri": "builtin", "columns": columns, "label_scope": "global"}},
            "partition": {
                "virtual_clients": groups,
                "max_images_per_user": numbers["images_per_user"],
            },
            "mechanism": {
                "kind": mechanism.kind_name(),
                "rounds": cohort.rounds,
                **mechanism.section_at(cohort, **options),
            },
            "policy": {
                "users_lower_bound": bound,
                "certify_at": numbers["certify_at"],
                "delta": delta,
                "unit": numbers["unit"],
                "epsilon_cap": _UNCAPPED,
            },
        }
    )
