"""Refuses options that a plan command would ignore: the price of other numbers misleads."""

from __future__ import annotations

import dataclasses

import typer

from fedemb.errors import ConfigError
from fedemb.pipelines.cli.planning.plan_numbers import schedule_options
from fedemb.pipelines.cli.planning.plan_options import PlanNumbers
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import MECHANISMS

_NEEDS_NOISE = ("noise_multiplier", "target_epsilon")


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def refuse_mixed(context: typer.Context, *, from_file: bool) -> None:
    """Refuses numbers beside a configuration file, and overrides without one.

    Raises:
      ConfigError: the options exclude one another.
    """
    numbers = [field.name for field in dataclasses.fields(PlanNumbers)]
    numbers.remove("target_epsilon")  # changes a configuration too
    given = [_spelled(name) for name in numbers if _given(context, name)]
    if given and from_file:
        raise ConfigError(
            f"{', '.join(given)} and --config exclude each other. Change the configuration with "
            "--set, for example --set mechanism.rounds=20."
        )
    if not from_file and _given(context, "set_"):
        raise ConfigError("--set changes a configuration. Pass the configuration by --config.")


def refuse_unknown_to(context: typer.Context, mechanism: type[MechanismPlan]) -> None:
    """Refuses options of other mechanisms.

    Raises:
      ConfigError: an option does not belong to this mechanism.
    """
    known = {kind: schedule_options(other) for kind, other in MECHANISMS.items()}
    for name in dict.fromkeys(name for names in known.values() for name in names):
        if _given(context, name) and name not in schedule_options(mechanism):
            kinds = [kind for kind, names in known.items() if name in names]
            raise ConfigError(
                f"{_spelled(name)} is for {' and '.join(kinds)}, not for {mechanism.kind_name()}. "
                "Drop the option or pass another --mechanism."
            )


def refuse_meaningless(context: typer.Context, mechanism: type[MechanismPlan]) -> None:
    """Refuses options about noise for a mechanism without noise.

    Raises:
      ConfigError: such an option was passed.
    """
    asked = [_spelled(name) for name in _NEEDS_NOISE if _given(context, name)]
    if asked and not mechanism.private:
        raise ConfigError(
            f"{', '.join(asked)} has no meaning for {mechanism.kind_name()}, which adds no noise "
            "and has no epsilon. Drop the option or pass another --mechanism."
        )
