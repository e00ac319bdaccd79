"""Makes a configuration from the numbers of a plan command."""

from __future__ import annotations

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.pipelines.cli.planning.plan_options import PlanNumbers
from fedemb.pipelines.run.load_config import validate
from fedemb.privacy.mechanisms.mechanism import Cohort, MechanismPlan

_UNCAPPED = 1e9
"""Budget of a plan that is not part of a run."""


_SCHEDULE = ("min_separation", "max_participations", "restart_every")


def schedule_options(mechanism: type[MechanismPlan]) -> list[str]:
    """Returns the settings of participation and correlated noise that a mechanism has."""
    return [name for name in _SCHEDULE if name in mechanism.section.model_fields]


def from_numbers(mechanism: type[MechanismPlan], numbers: PlanNumbers) -> RunConfig:
    """Returns a configuration with exactly what is priced; the rest has defaults.

    Raises:
      ConfigError: numbers are missing or contradict one another.
    """
    _require(numbers)
    bound = numbers.users_lower_bound or numbers.population or 0
    noise = numbers.noise_multiplier
    cohort = Cohort(
        population=numbers.population or bound,
        users_per_client=numbers.users_per_client,
        clients_per_round=numbers.clients_per_round or 0,
        noise_multiplier=1.0 if noise is None else noise,
        rounds=numbers.rounds or 0,
        virtual_clients=_virtual_clients(numbers),
    )
    columns = {"user_id": None} if numbers.unit == "image" else {}
    options = {name: getattr(numbers, name) for name in schedule_options(mechanism)}
    return validate(
        {
            "purpose": "simulation",
            **_training(mechanism),
            "data": {"source": {"uri": "builtin", "columns": columns, "label_scope": "global"}},
            "partition": {
                "virtual_clients": cohort.virtual_clients,
                "max_images_per_user": numbers.images_per_user,
            },
            "mechanism": {
                "kind": mechanism.kind_name(),
                "rounds": cohort.rounds,
                **mechanism.section_at(cohort, **options),
            },
            "policy": {
                "users_lower_bound": bound,
                "certify_at": numbers.certify_at or [],
                "delta": _delta(numbers, bound),
                "unit": numbers.unit.value,
                "epsilon_cap": _UNCAPPED,
            },
        }
    )


def _require(numbers: PlanNumbers) -> None:
    needed = ["clients_per_round", "rounds"]
    if not (numbers.virtual_clients and numbers.users_lower_bound):
        needed.insert(0, "population")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(numbers, name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is missing. Pass the option or --config; see the command's "
            "--help."
        )


def _virtual_clients(numbers: PlanNumbers) -> int:
    groups = numbers.virtual_clients
    if groups is None:
        groups = max(1, round((numbers.population or 0) / numbers.users_per_client))
    if (numbers.clients_per_round or 0) > groups:
        raise ConfigError(
            f"--clients-per-round {numbers.clients_per_round} exceeds the {groups} virtual clients."
            " Lower --clients-per-round or --users-per-client."
        )
    return groups


def _delta(numbers: PlanNumbers, bound: int) -> float:
    customary = float(bound**-1.1)
    delta = customary if numbers.delta is None else numbers.delta
    if delta >= 1 / bound:
        fitting = int(1 / delta)
        while delta >= 1 / fitting:
            fitting -= 1
        raise ConfigError(
            f"--delta {delta:g} is not below 1 / {bound}. Pass --delta {customary:.2g}, or for the "
            f"projection of a published epsilon --users-lower-bound {fitting}."
        )
    return delta


def _training(mechanism: type[MechanismPlan]) -> dict[str, object]:
    """Settings of the only kind of training that a mechanism prices; empty if it prices several."""
    section = mechanism.section
    if section.solves == "projection":
        return {
            "model": {"trainable": "projection"},
            "training": {"algorithm": "dp_covariance"},
        }
    if not (section.solves == "head" or section.samples_images):
        return {}
    return {
        "task": "classification",
        "model": {
            "classes": ["a", "b"],
            "trainable": "head" if section.solves == "head" else "all",
        },
        "training": {"algorithm": "dp_sgd", "unit_gradient": {"microbatch": 1}},
    }
