"""Runs one step of a prepared run and stops itself, as a lost node would, at a named point.

    python -m tests.kit.pipeline_runs.stopped_step STEP POINT FOLDER

The points are set from here by wrapping functions of the package; it has no hook for them. Without
a point (`-`) the step runs through. SIGCONT resumes it. The acts of the ledger have theirs in
killed_step.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedemb.errors import FedEmbError
from fedemb.runtime.step_context import StepContext
from fedemb.steps import audit_privacy, evaluate_embeddings, partition_users


def context_of(step: str, folder: Path) -> StepContext:
    """What a step of a run that was prepared in a folder is given."""
    from tests.kit.pipeline_runs import evaluation_run, partition_run, training_run

    match step:
        case "train_dp_fedemb":
            return training_run.ReadyRun(folder, training_run.config()).context()
        case "train_dp_sgd" | "evaluate_classifier":
            return training_run.ReadyRun(folder, training_run.classifier_config()).context()
        case "partition_users":
            return partition_run.context_of(partition_run.reserved_config(folder), folder)
        case _:
            return evaluation_run.FinishedRun(folder).context(evaluation_run.config())


def _logic(step: str) -> Callable[[StepContext], Any]:
    from fedemb.steps import evaluate_classifier, train_dp_fedemb, train_dp_sgd

    modules = {
        "train_dp_fedemb": train_dp_fedemb,
        "train_dp_sgd": train_dp_sgd,
        "evaluate_classifier": evaluate_classifier,
        "partition_users": partition_users,
        "audit_privacy": audit_privacy,
        "evaluate_embeddings": evaluate_embeddings,
    }
    return modules[step].run


def _points() -> dict[str, tuple[Any, str, int]]:
    """Name -> owner and name of a function, and before which call of it to stop."""
    from fedemb.keys import LocalKeyStore
    from fedemb.ledger import Ledger
    from fedemb.partition import shards
    from fedemb.steps import evaluate_classifier
    from fedemb.training import attempt, checkpoint
    from fedemb.training.round_log import RoundLog

    return {
        "a round": (RoundLog, "commit", 3),
        "a checkpoint": (checkpoint, "save", 1),
        "the weights": (attempt, "save_backbone", 1),
        "the card": (attempt, "write_signed", 1),
        "the commit": (Ledger, "commit", 1),
        "the end of the key": (LocalKeyStore, "destroy", 1),
        "the cleaning": (shards, "clean", 1),
        "a shard": (shards, "write_shard", 2),
        "the publication": (shards, "publish", 1),
        "the tidying": (shards, "drop_work", 1),
        "the scores": (audit_privacy, "_scores_table", 1),
        "the figures": (audit_privacy, "written", 1),
        "the public report": (audit_privacy, "write_signed", 1),
        "the evaluation record": (Ledger, "record_evaluation", 1),
        "the figures of the model": (evaluate_embeddings, "_measure_all", 1),
        "the figures of the classifier": (evaluate_classifier, "measure_classifiers", 1),
        "the page": (evaluate_embeddings, "utility_page", 1),
        "the utility report": (evaluate_embeddings, "write_signed", 1),
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
        _logic(step)(context_of(step, Path(folder)))
    except FedEmbError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
