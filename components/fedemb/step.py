"""The one place that knows images and the `@step` decorator, and what every step's body shares.

A step is a thin Python component: its body imports the package from its image and calls
`run(context)`. The same function runs in process in tests, under `kfp.local` on a laptop, and in a
pod.
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
from typing import Any, Literal

from kfp import dsl

from fedemb.errors import FedEmbError
from fedemb.step_context import StepContext

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


def step(image: Image) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a KFP component that runs in one of our images, installing nothing."""
    made: Any = dsl.component(base_image=PLACEHOLDER_IMAGES[image], install_kfp_package=False)
    return made


def log_event(kind: str, **fields: Any) -> None:
    """Writes one machine-readable line to the log. Public fields only."""
    sys.stdout.write(EVENT_PREFIX + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


@contextmanager
def step_process(
    name: str, values: Mapping[str, Any], *, private: bool = False
) -> Iterator[StepContext]:
    """Runs the body of a step: its context, logging, and errors as one sentence with an exit code.

    An error that is not ours is a bug: it keeps its traceback and ends with exit code 1. In a step
    that holds private data the log gets places and type of such an error without its message, which
    may quote shapes, values or names.

    Args:
      name: of the step.
      values: the component's arguments, its `locals()`.
      private: whether private data is in this process.
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
        if not private:
            raise
        sys.stdout.write("".join(traceback.format_tb(error.__traceback__)))
        sys.exit(1)
    log_event("step_finished", step=name, seconds=round(time.monotonic() - started, 2))
