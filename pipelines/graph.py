"""Builds the KFP pipeline from the function that says which step reads the outputs of which."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from fedemb.config import RunConfig
from fedemb.config.parameters import PARAMETERS, parameters_of
from fedemb.foundation.canonical_json import Json
from fedemb.runtime.step import Step, declared

if TYPE_CHECKING:
    from kfp.dsl import PipelineConfig, PipelineTask
    from kfp.dsl.graph_component import GraphComponent


class Run(Protocol):
    """Adds a step to the pipeline and returns its outputs by name."""

    def __call__(self, step: str, /, **given: Any) -> Mapping[str, Any]:
        """Passes outputs of earlier steps; the pipeline's parameters are passed by name."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """A function that runs steps, and what follows from it."""

    name: str
    description: str
    flow: Callable[[Run], None]
    at_exit: str
    """On a cluster it runs last, however the others ended; see `Step.at_exit`."""

    @cache  # noqa: B019 - there is one pipeline
    def producers(self) -> dict[str, dict[str, str]]:
        """Step -> input, or text of an earlier step -> the step whose output it is."""
        links: dict[str, dict[str, str]] = {}

        def record(step: str, **given: str) -> dict[str, str]:
            links[step] = given
            return dict.fromkeys(declared(step).outputs, step)

        self.flow(record)
        return links

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps in the order in which they run."""
        return tuple(self.producers())

    def declared(self) -> tuple[Step, ...]:
        """The declarations of its steps."""
        return tuple(declared(name) for name in self.steps)

    def ancestors(self) -> dict[str, set[str]]:
        """Step -> all steps that what it takes rests on."""
        found: dict[str, set[str]] = {}
        for step, links in self.producers().items():
            direct = set(links.values())
            found[step] = direct.union(*(found[near] for near in direct))
        return found

    def after(self) -> dict[str, tuple[str, ...]]:
        """The arrows: step -> steps right before it, without those that follow from others."""
        ancestors = self.ancestors()
        arrows: dict[str, tuple[str, ...]] = {}
        for step, links in self.producers().items():
            direct = set(links.values())
            far = {name for near in direct for name in ancestors[near]}
            arrows[step] = tuple(name for name in self.steps if name in direct - far)
        return arrows


def _imported(step: Step, reused: Mapping[str, str]) -> dict[str, Any]:
    """Returns the outputs of a finished step: texts, and artifacts imported from their paths."""
    from kfp import dsl

    return {
        name: path if name in step.texts else dsl.importer(path, dsl.Artifact, reimport=True).output
        for name, path in reused.items()
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

    finished = taken_over or {}

    def graph(*values: Any) -> None:
        named = run_id or dsl.PIPELINE_JOB_ID_PLACEHOLDER
        parameters = dict(zip(PARAMETERS, values, strict=True))
        parameters |= {"run_id": named, "reused": "{}"}  # `submit --from` replaces the latter

        def run(name: str, **given: Any) -> Mapping[str, Any]:
            step = declared(name)
            if name in finished:
                return _imported(step, finished[name])
            assert step.component is not None  # kfp is whole here
            passed = {key: parameters[key] for key in step.parameters if key not in given}
            task = step.component(**passed, **given)
            task.set_display_name(step.title)
            task.set_caching_options(step.cached)
            if configure is not None:
                configure(step, task)
            last.append(task)
            return task.outputs

        last: list[PipelineTask] = []
        if with_exit:
            run(pipeline.at_exit)
        with dsl.ExitHandler(last[0], name="run") if with_exit else nullcontext():
            pipeline.flow(run)

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
