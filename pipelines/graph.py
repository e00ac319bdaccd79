"""A pipeline is a list of steps; what flows between them follows from the names of artifacts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fedemb.config import RunConfig
from fedemb.config.parameters import PARAMETERS, parameters_of
from fedemb.foundation.canonical_json import Json
from fedemb.runtime.step import Step, declared

if TYPE_CHECKING:
    from kfp.dsl import PipelineConfig, PipelineTask
    from kfp.dsl.graph_component import GraphComponent


@dataclass(frozen=True)
class Pipeline:
    """Steps in the order in which they run; each takes what earlier ones gave, by name."""

    name: str
    description: str
    steps: tuple[str, ...]
    at_exit: str
    """On a cluster it runs last, however the others ended; see `Step.at_exit`."""

    def declared(self) -> tuple[Step, ...]:
        """The declarations of its steps."""
        return tuple(declared(name) for name in self.steps)

    def givers(self) -> dict[str, dict[str, str]]:
        """Step -> input, or text of an earlier step -> the step whose output it is.

        Raises:
          ValueError: no earlier step, or more than one, writes an input.
        """
        found: dict[str, list[str]] = {}
        links: dict[str, dict[str, str]] = {}
        for step in self.declared():
            for name in step.inputs:
                if len(found.get(name, ())) != 1:
                    raise ValueError(
                        f"{step.name} of {self.name} reads {name}, which these earlier steps "
                        f"write: {found.get(name, [])}. Make exactly one step write it."
                    )
            taken = [*step.inputs, *(name for name in step.parameters if name in found)]
            links[step.name] = {name: found[name][0] for name in taken}
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


def _imported(step: Step, reused: Mapping[str, str]) -> dict[tuple[str, str], Any]:
    """Returns the artifacts of a finished step, imported from their paths."""
    from kfp import dsl

    return {
        (step.name, name): dsl.importer(path, dsl.Artifact, reimport=True).output
        for name, path in reused.items()
        if name not in step.texts
    }


def build_pipeline(
    pipeline: Pipeline,
    run_id: str | None = None,
    taken_over: Mapping[str, Mapping[str, str]] | None = None,
    *,
    configure: Callable[[Step, PipelineTask], None] | None = None,
    pipeline_config: PipelineConfig | None = None,
    with_exit: bool = False,
) -> GraphComponent:
    """Returns the KFP pipeline.

    Args:
      pipeline: its steps.
      run_id: idempotency key of a local run, so that a resumed run finds its reservation and its
        rounds. None: the job's id, on a cluster.
      taken_over: step -> output -> path or text: outputs of finished steps that a resumed local
        run reuses.
      configure: called with every step and its task, for resources and node selection.
      pipeline_config: a `dsl.PipelineConfig`: options of the workflow, such as its time to live.
      with_exit: whether `pipeline.at_exit` runs at the end. On one machine the terminal says how a
        run ended.
    """
    from kfp import dsl

    givers, finished = pipeline.givers(), taken_over or {}

    def graph(*values: Any) -> None:
        given = dict(zip(PARAMETERS, values, strict=True))
        named = run_id or dsl.PIPELINE_JOB_ID_PLACEHOLDER
        given |= {"run_id": named, "reused": "{}"}  # `submit --from` replaces the latter

        def task_of(step: Step, artifacts: Mapping[str, Any]) -> PipelineTask:
            assert step.component is not None  # kfp is whole here
            task = step.component(**{name: given[name] for name in step.parameters}, **artifacts)
            task.set_display_name(step.title)
            task.set_caching_options(step.cached)
            if configure is not None:
                configure(step, task)
            return task

        outputs = dict[tuple[str, str], Any]()
        last = task_of(declared(pipeline.at_exit), {}) if with_exit else None
        with dsl.ExitHandler(last, name="run") if last else nullcontext():
            for step in pipeline.declared():
                if step.name in finished:
                    reused = finished[step.name]
                    given |= {name: text for name, text in reused.items() if name in step.texts}
                    outputs |= _imported(step, reused)
                    continue
                taken = {name: outputs[givers[step.name][name], name] for name in step.inputs}
                task = task_of(step, taken)
                given |= {name: task.outputs[name] for name in step.texts}
                outputs |= {(step.name, name): task.outputs[name] for name in step.outputs}

    _declare_parameters(graph, pipeline)
    options = cast("PipelineConfig", pipeline_config)  # None is kfp's own default
    name, text = pipeline.name, pipeline.description
    made = dsl.pipeline(name=name, description=text, pipeline_config=options)
    return made(graph)


def _declare_parameters(graph: Callable[..., None], pipeline: Pipeline) -> None:
    """Sets the signature and docstring from which kfp reads the pipeline's parameters."""
    parameters = PARAMETERS.items()
    lines = [f"    {name}: {item.description}" for name, item in parameters]
    graph.__doc__ = "\n".join([pipeline.description, "", "Args:", *lines])
    shown = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=item.type,
            default=inspect.Parameter.empty if item.default is None else item.default,
        )
        for name, item in parameters
    ]
    vars(graph)["__signature__"] = inspect.Signature(shown)


def pipeline_arguments(
    config: RunConfig,
    *,
    private_root: str,
    ledger: str,
    keys: str,
    releases: str,
    beam_options: tuple[str, ...] = (),
) -> dict[str, Json]:
    """Returns the arguments of a pipeline for a configuration and its four stores."""
    return {
        **parameters_of(config),
        "private_root": private_root,
        "ledger": ledger,
        "keys": keys,
        "releases": releases,
        "beam_options": list(beam_options),
    }
