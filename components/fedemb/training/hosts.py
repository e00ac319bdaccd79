"""Entry point of a non-chief host: `python -m fedemb.training.hosts`, see `host_messages`.

The host builds the rounds that the chief describes and computes what the chief requests. It reads
no store and no key.
"""

# The numeric libraries are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from signal import SIGABRT
from typing import Any

import numpy as np

from fedemb.config import RunConfig
from fedemb.errors import ConfigError, PlanMismatch, StorageError
from fedemb.models.backbone_files import load_backbone, save_backbone
from fedemb.models.keras_backend import Model, use_backend
from fedemb.privacy.registry import plan_mechanism
from fedemb.privacy.running import KeylessMechanism
from fedemb.runtime.provenance import code_digest
from fedemb.runtime.step import watched
from fedemb.training.backend_rounds import build_rounds
from fedemb.training.host_messages import (
    LOST,
    JobHost,
    Message,
    connect,
    is_multi_host,
    leave,
    receive,
    send,
)
from fedemb.training.jax_rounds import JaxRounds
from fedemb.training.rounds import TrainingRound

_LOG = logging.getLogger(__name__)


@contextmanager
def connected_hosts(config: RunConfig, backbone: Model, function: TrainingRound) -> Generator[None]:
    """Connects all hosts of the job to the chief while entered; does nothing on a single host.

    Args:
      config: configuration of the run.
      backbone: initial backbone of the rounds.
      function: the rounds.
    """
    if not is_multi_host():
        yield
        return
    try:
        if isinstance(function, JaxRounds):  # training only a head uses one host
            send(Message.JOB, np.frombuffer(_described(config, backbone, function), np.uint8))
        yield
    finally:  # a chief that stops also stops the other hosts
        leave()


def _described(config: RunConfig, backbone: Model, function: JaxRounds[Any, Any]) -> bytes:
    head = {
        "config": config.model_dump(mode="json"),
        "code_sha": code_digest(config),
        "shared_head_rows": function.shared_head_rows,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "backbone.keras")
        save_backbone(backbone, file)
        return json.dumps(head).encode() + b"\n" + file.read_bytes()


def _built(job: bytes) -> JaxRounds[Any, Any]:
    """Returns the chief's rounds, with a mechanism that has no keys."""
    head, file = job.split(b"\n", 1)
    described = json.loads(head)
    config = RunConfig.model_validate(described["config"])
    if code_digest(config) != described["code_sha"]:
        raise PlanMismatch(
            "the code of this host is not that of the chief, and would give other bits; give all "
            "hosts the image of the training step"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "backbone.keras")
        path.write_bytes(file)
        backbone = load_backbone(path, config.model)
    rounds, _ = build_rounds(
        backbone,
        KeylessMechanism(plan_mechanism(config)),
        config.model,
        config.training,
        shared_head_rows=described["shared_head_rows"],
    )
    assert isinstance(rounds, JaxRounds), "the chief sends a job only for JAX"
    return rounds


def run_worker_host() -> None:
    """Computes for the chief of the job until the chief finishes.

    Runs in a separate process, because JAX aborts a process that loses its chief before Python can
    report the reason.

    Raises:
      StorageError: the chief was lost, or the process was killed.
      SystemExit: the process failed and has reported the reason.
    """
    process = get_context("fork").Process(target=_follow, daemon=True)
    process.start()
    process.join()
    code = process.exitcode or 0
    if code == -SIGABRT:
        raise StorageError(LOST)
    if code < 0:
        raise StorageError(
            f"the computing process of this host was ended by signal {-code}; see whether its node "
            "has the memory, start the hosts again and resume the run"
        )
    if code:
        sys.exit(code)


def _follow() -> None:
    with watched("training.hosts", private=True):
        _compute()


def _compute() -> None:
    """Implements `follow` in its process.

    Raises:
      ConfigError: this process is the chief, or the job has no other host.
      PlanMismatch: this host has different code.
      StorageError: another host was lost.
    """
    use_backend("jax")
    if connect(JobHost.of_environment()):
        raise ConfigError(
            "this process is the chief of its job, or alone in it; run the training step here"
        )
    message, job = receive()
    if message is Message.JOB:
        _built(job).follow()
    leave()


if __name__ == "__main__":
    with watched("host", private=True):
        run_worker_host()
