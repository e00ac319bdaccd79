"""Options of `fedemb plan` that would be ignored are refused: a price of other numbers misleads."""

from __future__ import annotations

from typing import Any

import typer

from fedemb.errors import ConfigError

_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "min_separation": ("tree_aggregation", "blt"),
    "max_participations": ("tree_aggregation", "blt"),
    "restart_every": ("tree_aggregation",),
    "buffers": ("blt",),
}
"""Options that other mechanisms do not know."""


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
    context: typer.Context, mechanism: str, *, extrapolate: bool, search: float | None
) -> None:
    """Refuses options that this mechanism or command has no use for."""
    for name, kinds in _ONLY_FOR.items():
        if _given(context, name) and mechanism not in kinds:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for {' and '.join(kinds)}, and this plan is "
                f"{mechanism}; drop it or name another --mechanism"
            )
    if mechanism == "not_private":
        asked = [
            f"--{name.replace('_', '-')}"
            for name in ("noise_multiplier", "target_epsilon", "tuning_trials", "extrapolate")
            if _given(context, name)
        ]
        if asked:
            raise ConfigError(
                f"not_private has no noise and no epsilon, so {', '.join(asked)} means nothing; "
                "drop it or name another --mechanism"
            )
    if _given(context, "figure") and not extrapolate:
        raise ConfigError("--figure is where --extrapolate draws; add --extrapolate or drop it")
    if _given(context, "tuning_law") and search is None:
        raise ConfigError("--tuning-law belongs to --tuning-trials; add the mean number of trials")
