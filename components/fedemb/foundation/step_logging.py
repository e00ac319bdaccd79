"""The closed set of output that a step may log: events and a few lines for people.

On a cluster, logs leave the stores: Argo archives them, Kubeflow may copy them to the public root,
and everyone with access to the run can read them. So a step with private data suppresses all other
output: library logs, Python warnings and the stderr output of TensorFlow. Every new line needs an
entry here. Its placeholders may be filled only with public constants or values from a Public
document.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

from fedemb.foundation.canonical_json import ToJson

EVENT_PREFIX = "fedemb-event: "
"""Prefix of the lines that `fedemb.pipelines.run.local` reads: one JSON object each."""
EVERYTHING = "FEDEMB_LOG"
"""Environment variable; `everything` allows all output, for the data owner's own machine. The rules
of compiled pipelines refuse it."""

Kind = Literal["step_started", "step_finished", "step_failed", "outcome_not_kept"]

PARTITIONED = "partitioned the private images of run %s"
TRAINING_STARTED = (
    "run %s started training before and resumes with its original users; users deleted since then "
    "are left out from the next run on"
)
RESUMING = "resuming after round %d of %d"
ROUND = "round %d/%d"
"""Without the remaining time: round durations reveal the number of participants, and logs last."""
FEATURES = "computing features, once; how far, is not shown, because it tells how many people train"
ONE_BY_ONE = (
    "features are computed one image at a time, because on this machine the bits of a feature "
    "depend on the other images of its batch"
)
STOPPING = "asked to stop: finishing the current round"
HOSTS = "training on %d hosts"
MEASURED = "measured: %s"
NOT_COMPARABLE = "the previous release is not comparable: %s"
AUDITED = "audited: %s"
LINES = frozenset(
    {
        PARTITIONED,
        TRAINING_STARTED,
        RESUMING,
        ROUND,
        FEATURES,
        ONE_BY_ONE,
        STOPPING,
        HOSTS,
        MEASURED,
        NOT_COMPARABLE,
        AUDITED,
    }
)
"""All lines that a private step may log, before their placeholders are filled."""

_FORMAT = "%(levelname)s %(name)s: %(message)s"
_NOISY = ("apache_beam", "absl", "google", "urllib3", "tensorflow", "h5py", "matplotlib")
_open: list[TextIO] = []
"""Streams that stay open while all other output is suppressed."""


def log_event(kind: Kind, **fields: ToJson) -> None:
    """Writes one machine-readable line; fields must be public."""
    _say(EVENT_PREFIX + json.dumps({"kind": kind, **fields}) + "\n")


def log_places(trace: TracebackType | None) -> None:
    """Writes the code locations of an error: files and lines, without its message or any value."""
    _say("".join(traceback.format_tb(trace)))


def _say(text: str) -> None:
    out = _open[-1] if _open else sys.stdout
    out.write(text)
    out.flush()


@contextmanager
def step_log(*, private: bool) -> Generator[None]:
    """Sets up the log of a step; with private data, only events and the lines of this module."""
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not private or os.environ.get(EVERYTHING) == "everything":
        logging.basicConfig(level=logging.INFO, format=_FORMAT, force=True)
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out, Path(os.devnull).open("wb") as nowhere:
        handler = logging.StreamHandler(out)
        handler.addFilter(lambda record: record.msg in LINES)
        logging.basicConfig(level=logging.INFO, format=_FORMAT, handlers=[handler], force=True)
        _open.append(out)
        # File descriptors, not Python objects: native code and child processes write there too.
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, kept in zip((1, 2), before, strict=True):
                os.dup2(kept, descriptor)
                os.close(kept)
            _open.pop()
            logging.basicConfig(level=logging.INFO, format=_FORMAT, force=True)
