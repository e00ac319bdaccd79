"""What a step is: its declaration, and what every step's body shares.

A step is a thin Python component beside its logic: its body imports the package from its image and
calls `run(context)`. The same function runs in process in tests, under `kfp.local` on a laptop, and
in a pod. `@step` declares everything else that anybody must know of it, once: the graph, the local
runner, compile rules, the rights of its pod, profiles and the table of the docs follow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules
from typing import Any, Literal

from fedemb.config.parameters import OF_STEPS
from fedemb.documents.artifacts import Artifact
from fedemb.documents.run_artifacts import DESCRIPTIONS
from fedemb.errors import FedEmbError, Superseded
from fedemb.foundation.step_logging import log_event, log_places, step_log
from fedemb.runtime.outcome import keep_outcome
from fedemb.runtime.step_context import StepContext
from fedemb.storage.fencing import FencingToken, turns_taken

Image = Literal["light", "cpu", "trainer"]

PLACEHOLDER_IMAGES: dict[Image, str] = {
    "light": "fedemb-python-light:unpinned",
    "cpu": "fedemb-python-cpu:unpinned",
    "trainer": "fedemb-python-trainer:unpinned",
}
"""Symbolic images. `fedemb.pipelines.compile.cluster` replaces them by references with a digest;
a local run in subprocesses never looks at them. `trainer` is cpu, gpu or tpu, as the profile
says."""
SPELLED = {"dp": "DP", "sgd": "SGD", "fedemb": "FedEmb"}


@dataclass(frozen=True, kw_only=True)
class Rights:
    """What a step's service account may do; `infra/rights.yaml` is made of it.

    Tests run the real step behind it: a right too few stops it, and so does one it never uses.
    """

    private: Mapping[str, Literal["read", "write"]] = field(default_factory=dict)
    """Folder below `<private root>/<run>/`, or `deletion_marks` of the policy -> right; `write`
    also reads, replaces and deletes."""
    input: tuple[Literal["names", "private", "public"], ...] = ()
    """Images; `names`: names, sizes and versions of private ones, no content."""
    ledger: Literal["none", "read", "append"] = "none"
    """`append` may create a record, never replace or delete one."""
    signing: tuple[str, ...] = ()
    """Roles whose signing keys it may read."""
    keys: Mapping[str, Literal["read", "create", "destroy"]] = field(default_factory=dict)
    """Kind of the other keys (`KeyStore`: the first part of their names) -> right; `create` and
    `destroy` include `read`."""
    releases: Literal["none", "read", "create"] = "none"
    witness: Literal["none", "append"] = "none"
    """`append`, where `storage.witness` names a store: may add a mark, never replace one."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A declared step."""

    name: str
    task: Literal["embedding", "classification"] | None
    """The `RunConfig.task` whose pipeline it belongs to; None: it belongs to all."""
    summary: str
    """One sentence: the docstring of the component."""
    image: Image
    private: bool
    """Whether private data is in its process: its log then quotes no value of an error."""
    cached: bool
    """Whether its result may be taken from a cache, or it be retried: never where anything private
    or the ledger is involved."""
    once: bool
    """Whether a resumed run takes its finished result over instead of making it again."""
    resources: str
    """Which entry of a profile its pod gets, unless the profile names the step itself."""
    rights: Rights
    parameters: tuple[str, ...]
    """Names of the parameters it takes; see `StepContext`."""
    inputs: tuple[str, ...]
    """Artifacts it takes."""
    outputs: Mapping[str, type[Artifact]]
    """Artifacts it gives, each with its kind."""
    files: tuple[str, ...]
    """Its outputs that are files or folders; the others are texts, and figures for Kubeflow's
    page."""
    texts: tuple[str, ...]
    """Its outputs that are parameters of later steps."""
    at_exit: bool
    """Whether it runs at the end, however the run ended: it takes a `dsl.PipelineTaskFinalStatus`,
    no artifact, and has no rights."""
    component: Any
    """The KFP component."""

    @property
    def slug(self) -> str:
        """The name as Kubeflow spells it."""
        return self.name.replace("_", "-")

    @property
    def title(self) -> str:
        """The name as people read it."""
        words = [SPELLED.get(word, word) for word in self.name.split("_")]
        return " ".join([words[0].capitalize(), *words[1:]])

    @property
    def group(self) -> str:
        """Whose service account its pods use: steps that begin with one verb share its rights."""
        return self.name.partition("_")[0]


def step(
    *,
    image: Image,
    task: Literal["embedding", "classification"] | None = None,
    outputs: Mapping[str, type[Artifact]],
    rights: Rights | None = None,
    private: bool = True,
    cached: bool = False,
    once: bool = False,
    resources: str = "small",
) -> Callable[[Callable[..., Any]], Step]:
    """Declares a function to be a step: a KFP component that installs nothing in its image.

    Its signature names the parameters and artifacts, its docstring says in one sentence what it
    does. For the rest see `Step`; what is left out is the careful choice.

    Raises:
      TypeError: a parameter no context has, `outputs` names other outputs than the signature, or a
        step for the end takes or may do more than that.
    """
    from kfp import dsl
    from kfp.dsl.types import type_annotations as kfp_types

    def declare(function: Callable[..., Any]) -> Step:
        # By the signature and not by the component: a pod runs components and can make none.
        types = {name: item.annotation for name, item in signature(function).parameters.items()}
        inputs = tuple(
            n for n, kind in types.items() if kfp_types.is_artifact_wrapped_in_Input(kind)
        )
        given = {
            n: kind for n, kind in types.items() if kfp_types.is_artifact_wrapped_in_Output(kind)
        }
        texts = tuple(n for n, kind in types.items() if isinstance(kind, kfp_types.OutputPath))
        status = [n for n, kind in types.items() if kind is dsl.PipelineTaskFinalStatus]
        parameters = tuple(n for n in types if n not in (*inputs, *given, *texts, *status))
        if unknown := set(parameters) - {*OF_STEPS}:
            raise TypeError(f"{function.__name__} takes {sorted(unknown)}, which no context has")
        if {*given, *texts} != set(outputs):
            raise TypeError(
                f"{function.__name__} declares the outputs {sorted(outputs)}, but its signature "
                f"has {sorted([*given, *texts])}; say the kind of each"
            )
        if status and (inputs or rights):
            raise TypeError(
                f"{function.__name__} runs however the run ended, so it may take no artifact and "
                "have no rights"
            )
        component: Any = None
        if hasattr(dsl, "component"):
            made: Any = dsl.component(
                base_image=PLACEHOLDER_IMAGES[image], install_kfp_package=False
            )
            component = made(function)
            spec = component.component_spec
            for name, item in (*(spec.inputs or {}).items(), *(spec.outputs or {}).items()):
                item.description = (OF_STEPS if "@" not in item.type else DESCRIPTIONS).get(name)
        figures = (dsl.Metrics, dsl.ClassificationMetrics)
        return Step(
            name=function.__name__,
            task=task,
            summary=(function.__doc__ or "").partition("\n")[0],
            image=image,
            private=private,
            cached=cached,
            once=once,
            resources=resources,
            rights=rights or Rights(),
            parameters=parameters,
            inputs=inputs,
            outputs=dict(outputs),
            files=tuple(
                n
                for n, kind in given.items()
                if kfp_types.get_io_artifact_class(kind) not in figures
            ),
            texts=texts,
            at_exit=bool(status),
            component=component,
        )

    return declare


def declared(name: str) -> Step:
    """The declaration of a step, from its folder.

    Raises:
      ModuleNotFoundError: there is no such step.
    """
    return getattr(import_module(f"fedemb.steps.{name}.component"), name)


def leading_to(name: str, task: str) -> tuple[Step, ...]:
    """The declarations of a step and of all that what it takes rests on, givers first.

    Args:
      name: of the step.
      task: `RunConfig.task`; steps of another give nothing.
    """
    names = [module.name for module in iter_modules(import_module("fedemb.steps").__path__)]
    every = [step for step in map(declared, names) if step.task in (None, task)]
    givers = {output: step for step in every if not step.at_exit for output in step.outputs}
    found: dict[str, Step] = {}

    def find(step: Step) -> None:
        for artifact in step.inputs:
            find(givers[artifact])
        found.setdefault(step.name, step)

    find(declared(name))
    return tuple(found.values())


@contextmanager
def step_process(name: str, values: Mapping[str, Any]) -> Iterator[StepContext]:
    """Runs the body of a step: its context, logging, and errors as one sentence with an exit code.

    An error that is not ours is a bug: it keeps its traceback and ends with exit code 1. In a step
    that holds private data the log gets places and type of such an error without its message, which
    may quote shapes, values or names; see `fedemb.foundation.step_logging` for what else it gets.

    Args:
      name: of the step.
      values: the component's arguments, its `locals()`.
    """
    step = declared(name)

    def keep(fields: Mapping[str, Any]) -> None:
        try:
            keep_outcome(step.outputs, values, fields)
        except FedEmbError as error:
            log_event("outcome_not_kept", step=name, message=str(error))

    with watched(name, private=step.private, keep=keep):
        yield StepContext.of_component(values)


def _superseded(error: Exception, turns: Sequence[FencingToken]) -> bool:
    """Whether a later start of the step continues, so that this one has no outcome."""
    try:
        return isinstance(error, Superseded) or any(turn.over() for turn in turns)
    except FedEmbError:  # the store is gone: it fails for that reason
        return False


@contextmanager
def watched(
    name: str, *, private: bool, keep: Callable[[Mapping[str, Any]], None] = lambda _fields: None
) -> Iterator[None]:
    """What `step_process` does for a process that is no step.

    Args:
      name: of what runs.
      private: whether private data is in the process.
      keep: takes what is known of a failure, unless a later start of the step continues.
    """
    with step_log(private=private), turns_taken() as turns:
        started = time.monotonic()
        log_event("step_started", step=name, pid=os.getpid())
        try:
            yield
        except Exception as error:
            fields: dict[str, Any] = {"step": name, "error": type(error).__name__}
            if isinstance(error, FedEmbError):
                fields |= {"exit_code": error.exit_code, "message": str(error)}
            else:
                message = f"{fields['error']} in {name}, which is a bug; please report the log"
                fields |= {"exit_code": 1, "message": message}
            log_event("step_failed", **fields)
            if not _superseded(error, turns):
                token = turns[-1].number if turns else None
                keep({**fields, "fencing_token": token})
            if not isinstance(error, FedEmbError):
                if not private:
                    raise
                log_places(error.__traceback__)
            sys.exit(fields["exit_code"])
        log_event("step_finished", step=name, seconds=round(time.monotonic() - started, 2))
