"""Schedules as reviewed data: a YAML file each, checked, and priced before anything is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import AwareDatetime, Field, PositiveFloat, ValidationError, model_validator

from components.fedemb.artifacts import canonical_json, file_digest
from components.fedemb.config import Name, RunConfig, Section
from components.fedemb.errors import BudgetExceeded, ConfigError, LedgerError
from pipelines.cron import Cron


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
        return Cron.parse(self.cron).count(self.start, self.end)


@dataclass(frozen=True)
class Cost:
    """What a schedule costs a user who is in every run."""

    runs: int
    epsilon_one: float
    """Epsilon of one run."""
    epsilon: float
    """Epsilon of all of them."""
    delta: float
    method: str
    """How the runs were composed."""

    def __str__(self) -> str:
        """The sentence of a dry run."""
        return (
            f"{self.runs} runs, at most epsilon={self.epsilon:.3f} at delta={self.delta:g} for one "
            f"user in all of them ({self.method}; one run: {self.epsilon_one:.3f})"
        )


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
        return run_arguments(self.config)

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
      BudgetExceeded: a schedule costs more than its budget, or the policy's cap.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(f"no schedule (*.yaml) in {folder}; name the folder that holds them")
    return [load_schedule(file) for file in files]


def load_schedule(file: Path) -> Loaded:
    """Reads and prices one schedule; see `load_schedules`."""
    try:
        schedule = Schedule.model_validate(yaml.safe_load(file.read_text()))
    except (ValidationError, yaml.YAMLError, OSError) as error:
        raise ConfigError(
            f"schedule {file.name} is wrong: {_first_line(error)}; see `fedemb schedule schema`"
        ) from error
    if schedule.name != file.stem:
        raise ConfigError(
            f"schedule {file.name} names itself {schedule.name}; file and name must be the same"
        )
    from pipelines.load_config import load_config

    preset = "/" not in schedule.config and not schedule.config.endswith(".yaml")
    source = schedule.config if preset else file.parent / schedule.config
    config = load_config(source).updated(schedule.overrides)
    package = file.parent / schedule.package.path
    check_package(package, schedule.package.sha256)
    loaded = Loaded(schedule, config, package, cost_of(schedule, config))
    _ = loaded.arguments
    _check_budget(loaded)
    return loaded


def check_package(package: Path, sha256: str | None = None) -> None:
    """Checks a compiled pipeline against its pin and against the rules of compilation.

    Raises:
      ConfigError: missing, another file, or breaking a rule.
    """
    from pipelines.compile_rules import violations

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


def run_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments of the pipeline on a cluster, where all four stores must be named.

    Raises:
      ConfigError: a store is missing; a run without a lasting ledger would have no budget.
    """
    from pipelines.dp_fedemb import pipeline_arguments

    names = ("private_root", "ledger", "keys", "releases")
    stores = {name: getattr(config.storage, name) for name in names}
    if missing := [f"storage.{name}" for name, uri in stores.items() if not uri]:
        raise ConfigError(
            f"{', '.join(missing)} must be set for runs on a cluster; name the stores of `terraform"
            " output storage`"
        )
    return pipeline_arguments(config, **stores)


def cost_of(schedule: Schedule, config: RunConfig) -> Cost:
    """Prices all runs of a schedule exactly as the ledger will.

    Raises:
      BudgetExceeded: more runs than a planned policy commits.
      UnsupportedAccounting: no accountant is valid for the mechanism.
    """
    from components.fedemb.privacy.events import event_to_json
    from components.fedemb.privacy.ledger_budget import Charge, spent
    from components.fedemb.privacy.mechanism import plan_mechanism
    from components.reserve_budget.reserve import policy_terms

    if config.mechanism.kind == "not_private":
        raise ConfigError("mechanism.kind=not_private has no price and cannot be scheduled")
    plan = plan_mechanism(config)
    charge = Charge(
        sequence=0,
        run_id="",
        event=canonical_json(event_to_json(plan.event())),
        relation=plan.relation.name,
        rounds=plan.rounds,
        rounds_charged=plan.rounds,
    )
    terms = policy_terms(config.policy, plan)
    try:
        whole = spent(terms, [charge] * schedule.runs)
    except LedgerError as error:
        raise BudgetExceeded(
            f"schedule {schedule.name} holds {schedule.runs} runs, and policy "
            f"{config.policy.policy_id} commits {config.policy.planned_runs}; end it earlier"
        ) from error
    one = spent(terms, [charge])
    return Cost(schedule.runs, one.epsilon, whole.epsilon, whole.delta, whole.method)


def _check_budget(loaded: Loaded) -> None:
    schedule, policy = loaded.schedule, loaded.config.policy
    for cap, whose in ((schedule.budget.epsilon, "its budget"), (policy.epsilon_cap, "the policy")):
        if loaded.cost.epsilon > cap:
            raise BudgetExceeded(
                f"schedule {schedule.name} costs epsilon={loaded.cost.epsilon:.3f} in "
                f"{loaded.cost.runs} runs, and {whose} allows {cap:.3f}; end it earlier, run it "
                "less often, or raise noise_multiplier"
            )


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
