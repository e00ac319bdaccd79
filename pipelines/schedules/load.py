"""Reads a folder of schedules with all they name; checked and priced before any is applied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import Json
from fedemb.foundation.files import read_regular
from fedemb.foundation.strict_yaml import NotYaml, parse_yaml
from fedemb.pipelines.schedules.cost import Cost, cost_of
from fedemb.pipelines.schedules.names import fitted, recurring_run_name
from fedemb.pipelines.schedules.package import check_package, run_arguments
from fedemb.pipelines.schedules.schedule import MARK, Schedule


class _Read(NamedTuple):
    schedule: Schedule
    config: RunConfig


@dataclass(frozen=True)
class Loaded:
    """A schedule with everything it names, checked."""

    schedule: Schedule
    config: RunConfig
    package: Path
    cost: Cost

    @property
    def arguments(self) -> dict[str, Json]:
        """Arguments of the pipeline."""
        return run_arguments(self.config, self.schedule.beam_options, self.schedule.mlflow)

    @property
    def name(self) -> str:
        """Name of the recurring run."""
        return recurring_run_name(self.config, self.schedule.name)

    @property
    def description(self) -> str:
        """Description of the recurring run: marker, name of the schedule, cost.

        The marker and the name identify a recurring run that was created here.
        """
        text = f"{MARK} {self.schedule.name}: {self.cost}"
        return fitted(f"{text}. {self.schedule.description}".rstrip(" ."))


def load_schedules(folder: Path) -> list[Loaded]:
    """Reads and prices all schedules of a folder, in order of names.

    Raises:
      ConfigError: a file is wrong, or the package it pins is another one.
      BudgetExceeded: a schedule costs more than its budget or its policy's cap.
    """
    return [load_schedule(file) for file in _files(folder)]


def load_schedule(file: Path) -> Loaded:
    """Reads and prices one schedule; see `load_schedules`."""
    schedule, config = _read(file)
    package = file.parent / schedule.package.path
    check_package(package, schedule.package.sha256, config, schedule.mlflow)
    _ = run_arguments(config, schedule.beam_options, schedule.mlflow)
    return Loaded(schedule, config, package, cost_of(schedule, config))


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(
            f"no schedule (*.yaml) in {folder}; name the folder that holds them, and to stop the "
            "last one keep its file with `enabled: false`"
        )
    return files


def _read(file: Path) -> _Read:
    try:
        text = read_regular(file).decode()
        if re.search("^deploymentSpec:", text, re.MULTILINE):
            raise ConfigError(
                f"{file.name} is a compiled pipeline, and its folder is for schedules; move it to "
                f"{file.parent.name}/packages/ and say so in package.path"
            )
        schedule = Schedule.model_validate(parse_yaml(text))
    except (ValidationError, NotYaml, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"schedule {file.name} is wrong: {_first_line(error)}. See "
            "infra/schedules/example/weekly.yaml"
        ) from error
    if schedule.name != file.stem:
        raise ConfigError(
            f"schedule {file.name} names itself {schedule.name}; file and name must be the same"
        )
    from fedemb.pipelines.run.load_config import load_config, updated

    preset = "/" not in schedule.config and not schedule.config.endswith(".yaml")
    source = schedule.config if preset else file.parent / schedule.config
    return _Read(schedule, updated(load_config(source), schedule.overrides))


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    return str(error).splitlines()[0]
