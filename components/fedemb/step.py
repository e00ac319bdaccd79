"""What a step is: its declaration, and what every step's body shares.

A step is a thin Python component beside its logic: its body imports the package from its image and
calls `run(context)`. The same function runs in process in tests, under `kfp.local` on a laptop, and
in a pod. `@step` declares everything else that anybody must know of it, once: the graph, the local
runner, compile rules, the rights of its pod, profiles and the table of the docs follow.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from fedemb.documents.artifacts import Artifact
from fedemb.errors import FedEmbError
from fedemb.step_context import Parameters, StepContext

Image = Literal["light", "cpu", "trainer"]

PLACEHOLDER_IMAGES: dict[Image, str] = {
    "light": "fedemb-python-light:unpinned",
    "cpu": "fedemb-python-cpu:unpinned",
    "trainer": "fedemb-python-trainer:unpinned",
}
"""Symbolic images. `fedemb.pipelines.compile.cluster` replaces them by references with a digest;
a local run in subprocesses never looks at them. `trainer` is cpu, gpu or tpu, as the profile
says."""

EVENT_PREFIX = "fedemb-event: "
"""Begins the log lines that `fedemb.pipelines.run.local` reads: one JSON object each."""


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
    keys: Literal["none", "read", "create", "destroy"] = "none"
    """The other keys; `create` and `destroy` include `read`."""
    releases: Literal["none", "read", "create"] = "none"


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
    """Its outputs that are files or folders; the others are figures for Kubeflow's page."""
    component: Any
    """The KFP component."""

    @property
    def slug(self) -> str:
        """The name as Kubeflow spells it."""
        return self.name.replace("_", "-")

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
      TypeError: a parameter no context has, or `outputs` names other outputs than the signature.
    """
    from kfp import dsl

    def declare(function: Callable[..., Any]) -> Step:
        made: Any = dsl.component(base_image=PLACEHOLDER_IMAGES[image], install_kfp_package=False)
        component = made(function)
        spec = component.component_spec
        given, taken = spec.outputs or {}, spec.inputs or {}
        inputs = tuple(name for name, item in taken.items() if "@" in item.type)
        parameters = tuple(name for name in taken if name not in inputs)
        if unknown := set(parameters) - set(Parameters.__annotations__):
            raise TypeError(f"{function.__name__} takes {sorted(unknown)}, which no context has")
        if set(given) != set(outputs):
            raise TypeError(
                f"{function.__name__} declares the outputs {sorted(outputs)}, but its signature "
                f"has {sorted(given)}; say the kind of each"
            )
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
            files=tuple(name for name, item in given.items() if "Metrics@" not in item.type),
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
    every = [
        declared(module.name) for module in iter_modules(import_module("fedemb.steps").__path__)
    ]
    givers = {
        output: step for step in every if step.task in (None, task) for output in step.outputs
    }
    found: dict[str, Step] = {}

    def find(step: Step) -> None:
        for artifact in step.inputs:
            find(givers[artifact])
        found.setdefault(step.name, step)

    find(declared(name))
    return tuple(found.values())


def log_event(kind: str, **fields: Any) -> None:
    """Writes one machine-readable line to the log. Public fields only."""
    sys.stdout.write(EVENT_PREFIX + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


@contextmanager
def step_process(name: str, values: Mapping[str, Any]) -> Iterator[StepContext]:
    """Runs the body of a step: its context, logging, and errors as one sentence with an exit code.

    An error that is not ours is a bug: it keeps its traceback and ends with exit code 1. In a step
    that holds private data the log gets places and type of such an error without its message, which
    may quote shapes, values or names.

    Args:
      name: of the step.
      values: the component's arguments, its `locals()`.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True
    )
    for noisy in ("apache_beam", "absl", "google", "urllib3", "tensorflow", "h5py", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    started = time.monotonic()
    log_event("step_started", step=name, pid=os.getpid())
    try:
        yield StepContext.of_component(values)
    except FedEmbError as error:
        fields = {"step": name, "error": type(error).__name__, "exit_code": error.exit_code}
        log_event("step_failed", message=str(error), **fields)
        sys.exit(error.exit_code)
    except Exception as error:
        message = f"{type(error).__name__} in {name}, which is a bug; please report the log"
        log_event(
            "step_failed", step=name, error=type(error).__name__, exit_code=1, message=message
        )
        if not declared(name).private:
            raise
        sys.stdout.write("".join(traceback.format_tb(error.__traceback__)))
        sys.exit(1)
    log_event("step_finished", step=name, seconds=round(time.monotonic() - started, 2))
