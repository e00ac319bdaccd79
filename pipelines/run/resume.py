"""Steps that a resumed run reuses: training is charged once, evaluations may be repeated."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.errors import ConfigError, FedEmbError, InputError
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.load_config import overridden
from fedemb.pipelines.run.signed import ledger_of
from fedemb.pipelines.steps import pipeline_of

_READER = {"evaluation": "evaluate_", "audit": "audit_"}
"""Section -> prefix of the step that reads it; the gate denies artifacts of other sections."""


def steps_taken_over(run: RunDirectory, start: str | None) -> tuple[str, ...]:
    """The steps that do not run again.

    Args:
      run: the run directory.
      start: the first step to run again. None reuses the finished steps that run once,
        such as the training, with all they rest on, and runs the others: they are cheap.

    Raises:
      InputError: the step does not exist, or an earlier step has not finished.
    """
    pipeline = pipeline_of(run.config())
    finished = set(run.read_state().seconds)
    if start is None:
        ancestors = pipeline.ancestors()
        taken: set[str] = set()
        for step in pipeline.declared():
            whole = {step.name, *ancestors[step.name]}
            if (step.once or step.cached) and whole <= finished:
                taken |= whole
        return tuple(name for name in pipeline.steps if name in taken)
    if start not in pipeline.steps:
        raise InputError(f"Unknown step --from {start}. Pass one of {', '.join(pipeline.steps)}.")
    before = pipeline.steps[: pipeline.steps.index(start)]
    for name in before:
        if name not in finished:
            raise InputError(
                f"--from {start}: {name} has not finished in this run; resume it without --from "
                "first"
            )
    return before


def paths_taken_over(run: RunDirectory, steps: Sequence[str]) -> dict[str, dict[str, str]]:
    """Step -> output -> path of the reused steps, and the configuration as it is now.

    Raises:
      InputError: an output is gone.
    """
    paths: dict[str, dict[str, str]] = {}
    for step in pipeline_of(run.config()).declared():
        if step.name in steps:
            paths[step.name] = dict.fromkeys(step.texts, run.config().model_dump_json())
            for name in step.files:
                path = run.output(name, step.name)
                if path is None:
                    raise InputError(
                        f"{name} of {step.name} is gone from {run.public}; run the step again with "
                        f"--from {step.name}"
                    )
                paths[step.name][name] = str(path)
    return paths


def measured_otherwise(run: RunDirectory, overrides: Sequence[str], start: str | None) -> RunConfig:
    """Returns the configuration of a run with other free sections.

    Raises:
      ConfigError: a section that the reservation binds would change, what would change is read
        before the resumed step, the ledger named does not hold the run, or a release
        would take the name of the one before.
    """
    before = run.config()
    after = overridden(before, overrides)
    changed = [
        name for name in RunConfig.model_fields if getattr(before, name) != getattr(after, name)
    ]
    bound = [name for name in changed if name not in FREE_SECTIONS]
    if bound:
        raise ConfigError(
            f"The budget of run {run.run_id} was reserved for another {', '.join(bound)}. "
            f"Change only {', '.join(FREE_SECTIONS)}, or start a run with a new id."
        )
    # Sections that the reservation binds stay as written.
    after = before.model_copy(update={name: getattr(after, name) for name in changed})
    if changed and start is None:
        raise ConfigError(
            f"--set changes {', '.join(changed)}. Pass the step to resume from, such as --from "
            "evaluate_embeddings."
        )
    for section in _READER.keys() & set(changed):
        reader = next(n for n in pipeline_of(before).steps if n.startswith(_READER[section]))
        if reader in steps_taken_over(run, start):
            raise ConfigError(
                f"--set changes {section}, but {reader}, which reads it, would not run again. "
                f"Pass --from {reader}."
            )
    if before.storage.ledger != after.storage.ledger:
        _check_reserved(run, after)
    if run.stores(before)["private_root"] != run.stores(after)["private_root"]:
        _check_not_partitioned(run)
    published = run.document("release") or {}
    name = after.released_as(run.run_id)
    if (published.get("name"), published.get("version")) == name:
        raise ConfigError(
            f"run {run.run_id} has released {' '.join(name)}, and a release does not change; name "
            "another version with --set release.version=..."
        )
    return after


def _check_not_partitioned(run: RunDirectory) -> None:
    """Users stay where they were partitioned: the run is bound to them."""
    if "partition_users" in run.read_state().seconds:
        raise ConfigError(
            f"the users of run {run.run_id} are in {run.stores()['private_root']}, and the run is "
            "bound to them; leave storage.private_root as it is, or start a run with a new id"
        )


def _check_reserved(run: RunDirectory, after: RunConfig) -> None:
    """Checks the ledger, whose address may have changed, for the charged run."""
    if "reserve_budget" not in run.read_state().seconds:
        return
    try:
        charged = ledger_of(run, after).state.last_attempt(run.run_id) > 0
    except FedEmbError:
        charged = False
    if not charged:
        raise ConfigError(
            f"run {run.run_id} was charged in the ledger at {run.stores()['ledger']}, and none at "
            f"{after.storage.ledger} says so; leave storage.ledger as it is, or name where that "
            "ledger lies now"
        )
