"""Options of `fedemb plan` that would be ignored are refused: a price of other numbers misleads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from fedemb.errors import ConfigError

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def one_or_the_other(context: typer.Context, from_file: bool, numbers: dict[str, Any]) -> None:
    """Refuses numbers beside a configuration file, and overrides without one."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in (numbers if from_file else ("set_",))
        if _given(context, name)
    ]
    if given and from_file:
        raise ConfigError(
            f"{', '.join(given)} and --config exclude each other; change the configuration with "
            "--set, e.g. --set mechanism.rounds=20"
        )
    if given:
        raise ConfigError("--set changes a configuration; name one with --config")


def refuse_ignored(
    context: typer.Context,
    mechanism: type[MechanismPlan],
    *,
    drawn: bool,
    search: float | None,
) -> None:
    """Refuses options that this mechanism or command has no use for."""
    from fedemb.privacy.mechanisms.registry import MECHANISMS

    kind = mechanism.kind_name()
    for name in dict.fromkeys(name for other in MECHANISMS.values() for name in other.options):
        if _given(context, name) and name not in mechanism.options:
            kinds = [other for other, known in MECHANISMS.items() if name in known.options]
            raise ConfigError(
                f"--{name.replace('_', '-')} is for {' and '.join(kinds)}, and this plan is "
                f"{kind}; drop it or name another --mechanism"
            )
    if not mechanism.private:
        asked = [
            f"--{name.replace('_', '-')}"
            for name in ("noise_multiplier", "target_epsilon", "tuning_trials", "extrapolate")
            if _given(context, name)
        ]
        if asked:
            raise ConfigError(
                f"{kind} has no noise and no epsilon, so {', '.join(asked)} means nothing; "
                "drop it or name another --mechanism"
            )
    if _given(context, "figure") and not drawn:
        raise ConfigError(
            "--figure is where --extrapolate and --frontier draw; add one of them or drop it"
        )
    if _given(context, "tuning_law") and search is None:
        raise ConfigError("--tuning-law belongs to --tuning-trials; add the mean number of trials")
