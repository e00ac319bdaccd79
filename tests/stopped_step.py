"""Runs one step of a prepared run and stops itself, as a lost node would, at a named point.

    python -m tests.stopped_step STEP POINT FOLDER

The points are set from here by wrapping functions of the package; it has no hook for them. Without
a point (`-`) the step runs through. Let go on by SIGCONT.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedemb.errors import FedEmbError


def _train(folder: Path) -> None:
    from tests.training_run import ReadyRun, config

    ReadyRun(folder, config()).train()


def _partition(folder: Path) -> None:
    from fedemb.steps.partition_users.partition import run
    from tests.partition_run import context_of, make_config

    run(context_of(make_config(str(folder / "rows.parquet")), folder))


def _audit(folder: Path) -> None:
    from fedemb import planted_bug_suite
    from fedemb.provenance import code_digest
    from fedemb.steps.audit_privacy.audit import run
    from tests.evaluation_run import FinishedRun, config

    planted_bug_suite.RECORD = folder / "record.json"
    planted_bug_suite.write_record(
        planted_bug_suite.RECORD, passed=50, total=50, code_sha=code_digest()
    )
    run(FinishedRun(folder).context(config()))


def _points() -> dict[str, tuple[Any, str, int]]:
    """Name -> owner and name of a function, and before which call of it to stop."""
    from fedemb.steps.audit_privacy import audit
    from fedemb.steps.partition_users import shards
    from fedemb.steps.train_dp_fedemb import checkpoint, train
    from fedemb.steps.train_dp_fedemb.rounds import RoundLog

    return {
        "a round": (RoundLog, "commit", 3),
        "a checkpoint": (checkpoint, "save", 1),
        "the last act": (train, "write_json", 1),
        "the cleaning": (shards, "clean", 1),
        "the publication": (shards, "publish", 1),
        "the tidying": (shards, "drop_work", 1),
        "the figures": (audit, "audit_sentence", 1),
    }


def _arm(owner: Any, name: str, stop_at: int) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **kwargs)

    setattr(owner, name, stopping)


def main(step: str, point: str, folder: str) -> None:
    """See the module."""
    if point != "-":
        _arm(*_points()[point])
    try:
        {"train": _train, "partition": _partition, "audit": _audit}[step](Path(folder))
    except FedEmbError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
