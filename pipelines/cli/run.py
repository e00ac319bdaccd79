"""`fedemb run`: runs or resumes the whole pipeline on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError, Refused
from fedemb.foundation.environment import require_modules
from fedemb.pipelines.cli.options import (
    BeamOption,
    ConfigOption,
    DataOption,
    PolicyOption,
    RunsOption,
    SetOption,
    grouped,
)
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.config import RunConfig
    from fedemb.pipelines.run.directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """Options of a new run."""

    config: ConfigOption = "quickstart"
    data: DataOption = None
    policy: PolicyOption = None
    run_id: Annotated[str | None, typer.Option(help="Name of the run; default: time.")] = None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Options of a resumed run."""

    resume: Annotated[
        Path | None,
        typer.Option(
            help="Run to resume: its directory, or its name below --runs. Only --from, --set and "
            "--beam have an effect."
        ),
    ] = None
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Step to resume from; earlier steps are reused. Needs --resume. --set may change "
            "evaluation, audit, release and storage; no budget is charged again.",
        ),
    ] = None


@grouped
def run(
    *,
    new: NewRun,
    set_: SetOption = None,
    beam: BeamOption = None,
    runs: RunsOption = Path("runs"),
    resumed: Resumed,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run and its cost; write nothing.")
    ] = False,
) -> None:
    """Run the whole pipeline on this machine.

    Example: fedemb run --config mine.yaml --policy policy
    """
    require_modules("kfp", "apache_beam", "tensorflow")
    from fedemb.pipelines.run.command import execute

    if resumed.from_ is not None and resumed.resume is None:
        raise ConfigError("--from resumes a run. Pass its directory by --resume.")
    changed = None
    if resumed.resume is None:
        directory = start(new, set_ or [], runs, dry_run=dry_run)
    else:
        directory, changed = _resumed(resumed.resume, resumed.from_, set_, runs, dry_run=dry_run)
    if directory is None:
        return
    with directory.alone():
        if changed is not None:
            directory.change_config(changed)
        if beam:
            directory.set_beam_options(beam)
        exit_code = execute(directory, resumed.from_)
    sys.exit(exit_code)


def start(
    options: NewRun, overrides: Sequence[str], runs: Path, *, dry_run: bool
) -> RunDirectory | None:
    """Returns the directory of a new run; None after a dry run."""
    from fedemb.pipelines.cli.dry_run import refusal
    from fedemb.pipelines.run.command import checked, make_directory
    from fedemb.pipelines.run.directory import checked_run_id

    checked_run_id(options.run_id)
    loaded = checked(options.config, overrides, runs, options.data, options.policy)
    if dry_run:
        _say(loaded, (), charged=False)
        return None
    if said := refusal(loaded):
        raise Refused(f"{said.removesuffix('.')}. Nothing was read or written. Correct this first.")
    return make_directory(loaded, runs, options.run_id, options.data)


def _resumed(
    named: Path, start: str | None, overrides: Sequence[str] | None, runs: Path, *, dry_run: bool
) -> tuple[RunDirectory | None, RunConfig | None]:
    """Returns the directory of a run, None after a dry run, and its changed configuration."""
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.pipelines.run.local import changed_config, reused_steps

    directory = RunDirectory.open(named, runs)
    changed = changed_config(directory, overrides) if overrides else None
    reused = reused_steps(directory, start)  # refuses before anything changes
    if not dry_run:
        return directory, changed
    charged = "reserve_budget" in directory.read_state().seconds
    _say(changed or directory.config(), reused, charged)
    return None, None


def _say(config: RunConfig, reused: Sequence[str], charged: bool) -> None:
    from fedemb.pipelines.cli.dry_run import dry_run

    lines = list(dry_run(config, reused, charged))
    say(*lines)
    if lines[-1].startswith("budget: refused"):
        raise typer.Exit(Refused.exit_code)
