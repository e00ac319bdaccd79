"""Steps that a resumed run reuses: training is charged once, evaluations may be repeated."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.load_config import overridden
from fedemb.pipelines.steps import pipeline_of


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


def changed_config(run: RunDirectory, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration of a run with other free sections.

    The steps refuse a ledger without the run, other people, and reports of another section.

    Raises:
      ConfigError: a section that the reservation binds would change, or a release would take the
        name of the one before.
    """
    before = run.config()
    after = overridden(before, overrides)
    changed = {
        name: getattr(after, name)
        for name in RunConfig.model_fields
        if getattr(before, name) != getattr(after, name)
    }
    if bound := [name for name in changed if name not in FREE_SECTIONS]:
        raise ConfigError(
            f"The budget of run {run.run_id} was reserved for another {', '.join(bound)}. "
            f"Change only {', '.join(FREE_SECTIONS)}, or start a run with a new id."
        )
    after = before.model_copy(update=changed)  # sections that the reservation binds, as written
    published = run.document("release") or {}
    name = after.released_as(run.run_id)
    if (published.get("name"), published.get("version")) == name:
        raise ConfigError(
            f"run {run.run_id} has released {' '.join(name)}, and a release does not change; name "
            "another version with --set release.version=..."
        )
    return after
