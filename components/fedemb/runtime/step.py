"""The declaration of a step, and code that every step body shares.

A step is a module with a thin Python component and its logic `run(context)`. The component's body
imports the package from its image and calls `run(context)`. The same function runs in process in
tests, under `kfp.local` on a laptop, and in a pod. `@step` declares all other properties once. The
graph, the local runner, compile rules, the permissions of the pod, profiles and the table of the
docs are derived from it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from inspect import get_annotations, signature
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedemb.config.parameters import OF_STEPS
from fedemb.documents.artifacts import DESCRIPTIONS, Artifact
from fedemb.errors import FedEmbError, Superseded
from fedemb.foundation.canonical_json import ToJson
from fedemb.foundation.step_logging import log_event, log_places, step_log
from fedemb.runtime.step_context import StepContext, keep_outcome
from fedemb.storage.fencing import FencingToken, tokens_taken

if TYPE_CHECKING:
    from kfp.dsl.base_component import BaseComponent

Image = Literal["light", "cpu", "trainer"]

PLACEHOLDER_IMAGES: dict[Image, str] = {
    "light": "fedemb-python-light:unpinned",
    "cpu": "fedemb-python-cpu:unpinned",
    "trainer": "fedemb-python-trainer:unpinned",
}
"""Symbolic images. `fedemb.pipelines.cluster.compile` replaces them by references with a digest.
Local runs in subprocesses ignore them. The profile sets `trainer` to cpu, gpu or tpu."""


@dataclass(frozen=True, kw_only=True)
class Rights:
    """Permissions of a step's service account; `infra/rights.yaml` is generated from them.

    Tests run the real step with them: a missing permission and an unused permission both fail.
    """

    private: Mapping[str, Literal["read", "write"]] = field(default_factory=dict)
    """Folder below `<private root>/<run>/` -> permission;
    `write` also allows read, replace and delete."""
    input: tuple[Literal["names", "private", "public"], ...] = ()
    """Images; `names`: names, sizes and versions of private images, without content."""
    ledger: Literal["none", "read", "append"] = "none"
    """`append` allows to create a record, never to replace or delete a record."""
    signing: tuple[str, ...] = ()
    """Roles whose signing keys the step may read."""
    keys: Mapping[str, Literal["read", "create", "destroy"]] = field(default_factory=dict)
    """Kind of the other keys (`KeyStore`: the first part of their names) -> permission; `create`
    and `destroy` include `read`."""
    releases: Literal["none", "read", "create"] = "none"
    rollback_anchor: Literal["none", "append"] = "none"
    """`append`: the step may add a marker if the anchor is set, never replace a marker."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A declared step."""

    name: str
    summary: str
    """One-sentence summary: the docstring of the component."""
    image: Image
    private: bool
    """Whether the process holds private data; if so, its log omits the values of errors."""
    cached: bool
    """Whether the step may be cached or retried; always False if it uses private data or the
    ledger."""
    once: bool
    """Whether a resumed run reuses the completed result instead of computing it again."""
    resources: str
    """Profile entry for the step's pod, unless the profile has an entry for the step itself."""
    rights: Rights
    parameters: tuple[str, ...]
    """Names of the step's parameters; see `StepContext`."""
    inputs: tuple[str, ...]
    """Names of the input artifacts."""
    outputs: Mapping[str, type[Artifact]]
    """Output artifacts with their types."""
    files: tuple[str, ...]
    """Outputs that are files or folders; the other outputs are text, and metrics for Kubeflow's
    UI."""
    texts: tuple[str, ...]
    """Outputs that are parameters of later steps."""
    at_exit: bool
    """Whether the step runs at the end regardless of the run's outcome. An exit step takes a
    `dsl.PipelineTaskFinalStatus` and no artifact, and has no permissions."""
    component: BaseComponent | None
    """The KFP component; None in a pod, where kfp cannot create components."""

    @property
    def slug(self) -> str:
        """The step name in Kubeflow's format."""
        return self.name.replace("_", "-")

    @property
    def title(self) -> str:
        """The step name for display."""
        return self.name.replace("_", " ").capitalize()

    @property
    def group(self) -> str:
        """Service account group of the pod: the verb of the name, which no other step has."""
        return self.name.partition("_")[0]


def step(
    *,
    image: Image,
    outputs: Mapping[str, type[Artifact]],
    rights: Rights | None = None,
    private: bool = True,
    cached: bool = False,
    once: bool = False,
    resources: str = "small",
) -> Callable[[Callable[..., object]], Step]:
    """Declares a function as a step: a KFP component that installs no packages in its image.

    The function's signature names the parameters and artifacts; its docstring summarizes the step
    in one sentence. For the other arguments see `Step`; the defaults are the safe choice.

    Raises:
      TypeError: a parameter is not in any context, `outputs` differs from the signature, or an exit
          step takes artifacts or has permissions.
    """

    def declare(function: Callable[..., object]) -> Step:
        function.__annotations__ = get_annotations(function, eval_str=True)  # kfp reads no text
        ports = _ports_of(function)
        if {*ports.artifacts, *ports.texts} != set(outputs):
            raise TypeError(
                f"{function.__name__} declares the outputs {sorted(outputs)}, but its signature "
                f"has {sorted([*ports.artifacts, *ports.texts])}; say the kind of each"
            )
        if ports.at_exit and (ports.inputs or rights):
            raise TypeError(
                f"{function.__name__} runs however the run ended, so it may take no artifact and "
                "have no rights"
            )
        return Step(
            name=function.__name__,
            summary=(function.__doc__ or "").partition("\n")[0],
            image=image,
            private=private,
            cached=cached,
            once=once,
            resources=resources,
            rights=rights or Rights(),
            parameters=ports.parameters,
            inputs=ports.inputs,
            outputs=dict(outputs),
            files=ports.files,
            texts=ports.texts,
            at_exit=ports.at_exit,
            component=_component_of(function, image),
        )

    return declare


class _Ports(NamedTuple):
    """Parameters and artifacts in the signature of a step."""

    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    artifacts: tuple[str, ...]
    """Output artifacts."""
    files: tuple[str, ...]
    """Output artifacts that are not metrics."""
    texts: tuple[str, ...]
    at_exit: bool
    """Whether the step receives the status of the run."""


def _ports_of(function: Callable[..., object]) -> _Ports:
    # Uses the signature, not the component: a pod runs components and cannot create them.
    from kfp import dsl
    from kfp.dsl.types import type_annotations as kfp_types

    types = {name: item.annotation for name, item in signature(function).parameters.items()}
    inputs = tuple(n for n, kind in types.items() if kfp_types.is_artifact_wrapped_in_Input(kind))
    given = {n: kind for n, kind in types.items() if kfp_types.is_artifact_wrapped_in_Output(kind)}
    texts = tuple(n for n, kind in types.items() if isinstance(kind, kfp_types.OutputPath))
    status = [n for n, kind in types.items() if kind is dsl.PipelineTaskFinalStatus]
    parameters = tuple(n for n in types if n not in (*inputs, *given, *texts, *status))
    if unknown := set(parameters) - {*OF_STEPS}:
        raise TypeError(f"{function.__name__} takes {sorted(unknown)}, which no context has")
    figures = (dsl.Metrics, dsl.ClassificationMetrics)
    files = (n for n, kind in given.items() if kfp_types.get_io_artifact_class(kind) not in figures)
    return _Ports(parameters, inputs, tuple(given), tuple(files), texts, bool(status))


def _component_of(function: Callable[..., object], image: Image) -> BaseComponent | None:
    """Returns the KFP component of a step; None in a pod, where kfp cannot create components."""
    from kfp import dsl

    if not hasattr(dsl, "component"):
        return None
    made: Any = dsl.component(base_image=PLACEHOLDER_IMAGES[image], install_kfp_package=False)
    component = made(function)
    spec = component.component_spec
    for name, item in (*(spec.inputs or {}).items(), *(spec.outputs or {}).items()):
        item.description = (OF_STEPS if "@" not in item.type else DESCRIPTIONS).get(name)
    return component


def declared(name: str) -> Step:
    """Returns the declaration of a step, loaded from its module.

    Raises:
      ModuleNotFoundError: the step does not exist.
    """
    return getattr(import_module(f"fedemb.steps.{name}"), name)


def leading_to(name: str) -> tuple[Step, ...]:
    """Returns the declarations of a step and of all steps it depends on, dependencies first."""
    names = [module.name for module in iter_modules(import_module("fedemb.steps").__path__)]
    producers = {
        output: step for step in map(declared, names) if not step.at_exit for output in step.outputs
    }
    found: dict[str, Step] = {}

    def find(step: Step) -> None:
        for artifact in step.inputs:
            find(producers[artifact])
        found.setdefault(step.name, step)

    find(declared(name))
    return tuple(found.values())


@contextmanager
def step_process(name: str, values: Mapping[str, object]) -> Iterator[StepContext]:
    """Runs the body of a step: context, logging, and one-sentence errors with an exit code.

    An unexpected error is a bug: it keeps its traceback and exits with code 1. If the step holds
    private data, the log contains only locations and type of such an error. Its message is omitted,
    because it may quote shapes, values or names; see `fedemb.foundation.step_logging`.

    Args:
      name: name of the step.
      values: the component's arguments, its `locals()`.
    """
    step = declared(name)
    gc.set_threshold(100_000)  # ledger and syntax trees stay: collecting among them finds nothing

    def keep(fields: Mapping[str, ToJson]) -> None:
        try:
            keep_outcome(step.outputs, values, fields)
        except FedEmbError as error:
            log_event("outcome_not_kept", step=name, message=str(error))

    with watched(name, private=step.private, keep=keep):
        yield StepContext.of_component(values)


def _superseded(error: Exception, tokens: Sequence[FencingToken]) -> bool:
    """Returns whether a later start of the step continues, so that this start has no outcome."""
    try:
        return isinstance(error, Superseded) or any(token.over() for token in tokens)
    except FedEmbError:  # the store is unavailable, which is the error to report
        return False


@contextmanager
def watched(
    name: str, *, private: bool, keep: Callable[[Mapping[str, ToJson]], None] = lambda _fields: None
) -> Iterator[None]:
    """Implements `step_process` for processes that are not steps.

    Args:
      name: name of the process.
      private: whether the process holds private data.
      keep: stores the details of a failure, unless a later start of the step continues.
    """
    with step_log(private=private), tokens_taken() as tokens:
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
            if not _superseded(error, tokens):
                token = tokens[-1].number if tokens else None
                keep({**fields, "fencing_token": token})
            if not isinstance(error, FedEmbError):
                if not private:
                    raise
                log_places(error.__traceback__)
            sys.exit(fields["exit_code"])
        log_event("step_finished", step=name, seconds=round(time.monotonic() - started, 2))
