"""Schedules as reviewed data: a YAML file each, checked, and priced before anything is applied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import AwareDatetime, Field, PositiveFloat, ValidationError, model_validator

from fedemb.config import Name, RunConfig, Section
from fedemb.documents.artifacts import file_digest
from fedemb.errors import ConfigError
from fedemb.pipelines.compile.rules import SECRET_VALUES
from fedemb.pipelines.run.load_config import BUILTIN
from fedemb.pipelines.schedules.cost import Cost, check_together, cost_of
from fedemb.pipelines.schedules.cron import Cron

SECRET_OPTION = re.compile(r"--\w*(secret|password|token|access_key)\w*[= ]", re.I)


class Package(Section):
    """The compiled pipeline, pinned."""

    path: str
    """YAML of `fedemb compile`, relative to the schedule's file."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of that file; the uploaded version bears its first digits as its name."""


class ScheduleBudget(Section):
    """What the whole schedule may cost, from its first to its last run."""

    epsilon: PositiveFloat
    """Cap on the cumulative epsilon of a user in every run, at the policy's delta."""


class Schedule(Section):
    """A recurring run."""

    schema_: Literal["fedemb/schedule/1"] = Field(alias="schema")
    name: Name
    """Name of the recurring run; also that of the file."""
    description: str = ""
    experiment: str = "dp-fedemb"
    """Experiment the runs are filed under."""
    package: Package
    config: str
    """Configuration: a preset's name, or a YAML file relative to the schedule's file."""
    overrides: dict[str, Any] = Field(default={})
    """Dotted keys of the configuration -> values."""
    cron: str
    """Six fields, seconds first, UTC."""
    start: AwareDatetime
    """No run before. Fixed, so that the number of runs is."""
    end: AwareDatetime
    """No run after. A schedule without end has no price."""
    no_catchup: Literal[True]
    """Missed intervals are not run afterwards."""
    max_concurrency: Literal[1]
    """Two runs at once would race for one budget."""
    enabled: bool = True
    service_account: str = "fedemb-run"
    pipeline_root: str | None = None
    """Public root; null: that of the namespace."""
    beam_options: tuple[str, ...] = ()
    """Options of the Beam engine that partitions the users, e.g. --runner=DataflowRunner."""
    budget: ScheduleBudget

    @model_validator(mode="after")
    def _check(self) -> Self:
        Cron.parse(self.cron)
        if self.end <= self.start:
            raise ValueError(f"end={self.end} must lie after start={self.start}")
        return self

    @property
    def runs(self) -> int:
        """Runs from start to end."""
        return self.runs_until(self.end)

    def runs_until(self, moment: datetime) -> int:
        """Runs from start to a moment."""
        return Cron.parse(self.cron).count(self.start, min(moment, self.end))


@dataclass(frozen=True)
class Loaded:
    """A schedule with everything it names, checked."""

    schedule: Schedule
    config: RunConfig
    package: Path
    cost: Cost

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the pipeline."""
        return run_arguments(self.config, self.schedule.beam_options)

    @property
    def description(self) -> str:
        """What the recurring run says in the user interface; its first word marks it as ours."""
        text = f"{MARK} {self.schedule.name}: {self.cost}"
        return f"{text}. {self.schedule.description}".rstrip(" .")


MARK = "fedemb/schedule/1"
"""First word of the description of every recurring run that is ours to change."""


def load_schedules(folder: Path) -> list[Loaded]:
    """Reads and prices all schedules of a folder, in order of names.

    Raises:
      ConfigError: a file is wrong, or the package it pins is another one.
      BudgetExceeded: a schedule costs more than its budget or its policy's cap, or all schedules
        of a policy together do.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(
            f"no schedule (*.yaml) in {folder}; name the folder that holds them, and to stop the "
            "last one keep its file with `enabled: false`"
        )
    schedules = [load_schedule(file) for file in files]
    check_together(schedules)
    return schedules


def load_schedule(file: Path) -> Loaded:
    """Reads and prices one schedule; see `load_schedules`."""
    try:
        documents = list(yaml.safe_load_all(file.read_text()))
        if any(isinstance(item, dict) and "deploymentSpec" in item for item in documents):
            raise ConfigError(
                f"{file.name} is a compiled pipeline, and its folder is for schedules; move it to "
                f"{file.parent.name}/packages/ and say so in package.path"
            )
        (tree,) = documents if len(documents) == 1 else (documents,)
        schedule = Schedule.model_validate(tree)
    except (ValidationError, yaml.YAMLError, OSError) as error:
        raise ConfigError(
            f"schedule {file.name} is wrong: {_first_line(error)}; see `fedemb schedule schema`"
        ) from error
    if schedule.name != file.stem:
        raise ConfigError(
            f"schedule {file.name} names itself {schedule.name}; file and name must be the same"
        )
    from fedemb.pipelines.run.load_config import load_config

    preset = "/" not in schedule.config and not schedule.config.endswith(".yaml")
    source = schedule.config if preset else file.parent / schedule.config
    config = load_config(source).updated(schedule.overrides)
    package = file.parent / schedule.package.path
    check_package(package, schedule.package.sha256)
    _ = run_arguments(config, schedule.beam_options)
    return Loaded(schedule, config, package, cost_of(schedule, config))


def check_package(package: Path, sha256: str | None = None) -> None:
    """Checks a compiled pipeline against its pin and against the rules of compilation.

    Raises:
      ConfigError: missing, another file, or breaking a rule.
    """
    from fedemb.pipelines.compile.rules import violations

    if not package.is_file():
        raise ConfigError(f"package {package.name} is missing; make it with `fedemb compile`")
    if sha256 is not None and (found := file_digest(package)) != sha256:
        raise ConfigError(
            f"package {package.name} has sha256 {found}, the schedule pins {sha256}; review the "
            "difference, then pin the new one"
        )
    try:
        documents = list(yaml.safe_load_all(package.read_text()))
        problems = violations(documents)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"package {package.name} is no compiled pipeline; make it with `fedemb compile`"
        ) from None
    if problems:
        raise ConfigError(f"package {package.name} breaks a rule: {problems[0]}")


def run_arguments(config: RunConfig, beam_options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of the pipeline on a cluster, where all four stores must be named.

    Raises:
      ConfigError: a store is missing, and a run without a lasting ledger would have no budget; a
        source lies on this machine; or a secret stands in an argument, which the API keeps.
    """
    from fedemb.pipelines.dp_fedemb import pipeline_arguments

    names = ("private_root", "ledger", "keys", "releases")
    stores = {name: getattr(config.storage, name) for name in names}
    if missing := [f"storage.{name}" for name, uri in stores.items() if not uri]:
        raise ConfigError(
            f"{', '.join(missing)} must be set for runs on a cluster; name the stores of `terraform"
            " output storage`"
        )
    public = config.pretraining.source
    sources = {
        "data.source.uri": config.data.source.uri,
        "pretraining.source.uri": public.uri if public else "none",
    }
    for setting, uri in sources.items():
        if uri == BUILTIN or ("://" not in uri and uri != "none" and not uri.startswith("/")):
            raise ConfigError(
                f"{setting}={uri} is on this machine, where no pod can read it; name an object "
                "store, or an absolute path on a mounted volume"
            )
    arguments = pipeline_arguments(config, **stores, beam_options=beam_options)
    for name, value in arguments.items():
        if SECRET_VALUES.search(str(value)) or SECRET_OPTION.search(str(value)):
            raise ConfigError(
                f"the argument {name} holds a key or a password, and Kubeflow keeps and shows "
                "arguments; name a secret of the cluster in the profile's `secrets`"
            )
    return arguments


def as_utc(moment: datetime | None) -> datetime | None:
    """A moment in UTC without fractions of a second, as the API keeps it."""
    return None if moment is None else moment.astimezone(UTC).replace(microsecond=0)


def json_schema() -> Mapping[str, Any]:
    """JSON schema of a schedule's file, as in `infra/schedules/schedule.schema.json`."""
    return Schedule.model_json_schema(by_alias=True)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    return str(error).splitlines()[0]
