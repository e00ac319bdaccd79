"""Runs one private step as its pod does, on a prepared run, with noise planted in its process.

    python -m tests.kit.pipeline_runs.logged_step STEP[-classifier] FAULT FOLDER

Everything that could carry data to the log says so: a library's logger, a Python warning, print,
bytes on stderr as native code writes them, a thread that dies. FAULT: `none`, `bug` (an exception
whose message quotes data, in the midst of the step) or `refused` (an artifact of another run).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedemb.runtime.step_context import StepContext
from fedemb.steps import partition_users
from tests.kit.pipeline_runs.stopped_step import context_of

SECRET = "Ada-Lovelace-1815"


class _Artifact(SimpleNamespace):
    """An output of KFP's: whatever figures a step logs there are read by who reads the page."""

    def log_metric(self, *_: Any) -> None: ...

    def log_roc_curve(self, *_: Any) -> None: ...


def _noise() -> None:
    logging.getLogger("some.library").error("the row of %s", SECRET)
    logging.getLogger("fedemb.data").warning("user %s has 17 images", SECRET)
    warnings.warn(f"overflow at {SECRET}", RuntimeWarning, stacklevel=1)
    sys.stdout.write(f"{SECRET}\n")
    sys.stderr.write(f"{SECRET}\n")
    os.write(2, f"tensorflow/core: {SECRET}\n".encode())
    os.system(f"echo {SECRET}")
    thread = threading.Thread(target=lambda: {}[SECRET])
    thread.start()
    thread.join()


def _tensorflow_noise() -> None:
    import tensorflow as tf

    tf.print(SECRET)
    tf.print(SECRET, output_stream=sys.stdout)


def _midst(step: str) -> tuple[Any, str]:
    """A function every private step calls once it has read its documents."""
    if step == "partition_users":
        return partition_users, "partition_images"
    return StepContext, "private"


def main(step: str, fault: str, folder: str) -> None:
    """See the module."""
    from fedemb.runtime.step import declared

    context = context_of(step, Path(folder))
    declaration = declared(step.partition("-")[0])
    paths, given = vars(context.artifacts)["_paths"], dict(context.given)
    given["config"] = given["config"].model_dump_json()
    given["beam_options"] = []
    if fault == "refused":
        given["run_id"] = "another-run"
    names = (*declaration.inputs, *declaration.outputs)
    artifacts = {
        name: _Artifact(path=str(paths.get(name, Path(folder, name))), uri="", metadata={})
        for name in names
    }
    owner, name = _midst(step)
    original = getattr(owner, name)

    def noisy(*args: Any, **kwargs: Any) -> Any:
        _noise()
        if step != "partition_users":
            _tensorflow_noise()
        if fault == "bug":
            raise ValueError(f"shape (17,) of {SECRET}")
        return original(*args, **kwargs)

    setattr(owner, name, noisy)
    values = {name: given[name] for name in declaration.parameters}
    sys.stdout.write(json.dumps({"before": step}) + "\n")
    sys.stdout.flush()
    declaration.component.python_func(**values, **artifacts)


if __name__ == "__main__":
    main(*sys.argv[1:])
