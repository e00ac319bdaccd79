"""A pipeline is a list of steps; what flows between them follows from the names of artifacts."""
# No `from __future__ import annotations` here: kfp reads the types of a graph's arguments.

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fedemb.config import RunConfig
from fedemb.documents.artifacts import Artifact
from fedemb.step import Step, declared


@dataclass(frozen=True)
class Pipeline:
    """Steps in the order in which they run; each takes what earlier ones gave, by name."""

    name: str
    description: str
    steps: tuple[str, ...]
    at_exit: str = "show_outcome"
    """On a cluster it runs last, however the others ended; see `Step.at_exit`."""

    def declared(self) -> tuple[Step, ...]:
        """The declarations of its steps."""
        return tuple(declared(name) for name in self.steps)

    def givers(self) -> dict[str, dict[str, str]]:
        """Step -> input -> the earlier step whose output it is.

        Raises:
          ValueError: nobody gives an input before it is taken, or more than one step does.
        """
        found: dict[str, list[str]] = {}
        links: dict[str, dict[str, str]] = {}
        for step in self.declared():
            for name in step.inputs:
                if len(found.get(name, ())) != 1:
                    raise ValueError(
                        f"{step.name} of {self.name} takes {name}, which {found.get(name, [])} "
                        "give before it; exactly one step must"
                    )
            links[step.name] = {name: found[name][0] for name in step.inputs}
            for name in step.outputs:
                found.setdefault(name, []).append(step.name)
        return links

    def ancestors(self) -> dict[str, set[str]]:
        """Step -> all steps that what it takes rests on."""
        found: dict[str, set[str]] = {}
        for step, links in self.givers().items():
            direct = set(links.values())
            found[step] = direct.union(*(found[near] for near in direct))
        return found

    def after(self) -> dict[str, tuple[str, ...]]:
        """The arrows: step -> steps right before it, without those that follow from others."""
        ancestors = self.ancestors()
        arrows: dict[str, tuple[str, ...]] = {}
        for step, links in self.givers().items():
            direct = set(links.values())
            far = {name for near in direct for name in ancestors[near]}
            arrows[step] = tuple(name for name in self.steps if name in direct - far)
        return arrows

    def published(self) -> Mapping[str, Mapping[str, type[Artifact]]]:
        """Step -> output -> kind: all that may ever be copied out of a run."""
        return {
            step.name: {name: step.outputs[name] for name in step.files} for step in self.declared()
        }


def build_pipeline(
    pipeline: Pipeline,
    run_id: str | None = None,
    taken_over: Mapping[str, Mapping[str, str]] | None = None,
    *,
    configure: Callable[[Step, Any], None] | None = None,
    pipeline_config: Any = None,
    with_exit: bool = False,
) -> Any:
    """Returns the KFP pipeline.

    Args:
      pipeline: its steps.
      run_id: idempotency key of the run. None: on a cluster, the job's id. A local run names its
        own, so that a resumed run finds its reservation and its rounds.
      taken_over: step -> output -> path: what a resumed local run takes over from finished steps,
        which do not run again.
      configure: called with every step and its task, for resources and node selection.
      pipeline_config: a `dsl.PipelineConfig`: options of the workflow, such as its time to live.
      with_exit: whether `pipeline.at_exit` runs at the end. On one machine the terminal says how a
        run ended.
    """
    from kfp import dsl

    givers, finished = pipeline.givers(), taken_over or {}

    @dsl.pipeline(
        name=pipeline.name, description=pipeline.description, pipeline_config=pipeline_config
    )
    def graph(  # noqa: PLR0917 - kfp passes them by name
        config: str,
        private_root: str,
        ledger: str,
        keys: str,
        releases: str,
        public_start: str,
        beam_options: list,
    ):
        given = {
            "config": config,
            "run_id": run_id or dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            "private_root": private_root,
            "ledger": ledger,
            "keys": keys,
            "releases": releases,
            "public_start": public_start,
            "beam_options": beam_options,
        }

        def task_of(step: Step, artifacts: Mapping[str, Any]) -> Any:
            task = step.component(**{name: given[name] for name in step.parameters}, **artifacts)
            task.set_caching_options(step.cached)
            if configure is not None:
                configure(step, task)
            return task

        ending = nullcontext()
        if with_exit:
            ending = dsl.ExitHandler(task_of(declared(pipeline.at_exit), {}), name="run")
        outputs: dict[tuple[str, str], Any] = {}
        with ending:
            for step in pipeline.declared():
                if step.name in finished:
                    for name, path in finished[step.name].items():
                        imported = dsl.importer(path, dsl.Artifact, reimport=True)
                        outputs[step.name, name] = imported.output
                    continue
                taken = {name: outputs[giver, name] for name, giver in givers[step.name].items()}
                task = task_of(step, taken)
                outputs |= {(step.name, name): task.outputs[name] for name in step.outputs}

    return graph


def pipeline_arguments(
    config: RunConfig,
    *,
    private_root: str,
    ledger: str,
    keys: str,
    releases: str,
    beam_options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Returns the arguments of a pipeline for a configuration and its four stores.

    Sections travel as JSON text: kfp's structs know no null and turn 32 into 32.0.
    """
    return {
        "config": config.model_dump_json(),
        "private_root": private_root,
        "ledger": ledger,
        "keys": keys,
        "releases": releases,
        "public_start": config.public_start().model_dump_json(),
        "beam_options": list(beam_options),
    }
