"""Runs one step of a prepared run and stops itself, as a lost node would, at a named point.

    python -m tests.kit.pipeline_runs.stopped_step STEP POINT FOLDER

The points are set from here by wrapping functions of the package; it has no hook for them. Without
a point (`-`) the step runs through. SIGCONT resumes it. STEP may be an act on the ledger of an
honest run, too.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedemb.errors import FedEmbError
from fedemb.keys import LocalKeyStore
from fedemb.runtime.step_context import StepContext
from fedemb.steps import (
    account_privacy,
    audit_privacy,
    evaluate_model,
    release_model,
    reserve_budget,
)
from fedemb.storage.local import LocalStore
from tests.kit.pipeline_runs import honest_run

Chosen = Callable[..., bool]


def _record(number: int) -> Chosen:
    return lambda self, name, data: name == f"weekly/{number:08d}.json"


def _always(*_: Any, **__: Any) -> bool:
    return True


ACTS: dict[str, dict[str, tuple[Any, str, Chosen]]] = {
    "reserve": {
        "record": (LocalStore, "create", _record(1)),
        "key": (LocalKeyStore, "create", lambda _, name, *__: name.startswith("reservation/")),
        "document": (reserve_budget, "write_bytes", _always),
    },
    "bind": {"record": (LocalStore, "create", _record(2))},
    "commit": {
        "record": (LocalStore, "create", _record(3)),
        "key is destroyed": (LocalKeyStore, "destroy", _always),
    },
    "account": {
        "report": (account_privacy, "build_report", _always),
        "signature": (account_privacy, "write_signed", _always),
        "lineage": (account_privacy, "write_run", _always),
        "page": (account_privacy, "write_bytes", _always),
    },
    "release": {
        "bundle": (release_model.parts, "place", _always),
        "signature": (release_model.parts, "write_manifest", _always),
        "tree": (LocalStore, "create_tree", _always),
        "marker": (LocalStore, "create", lambda _, name, __: name == "glyphs/1.0.json"),
        "ledger": (LocalStore, "create", _record(4)),
        "document": (release_model, "write_bytes", lambda p, _: p.stem == "release"),
    },
}
"""Act -> what it does -> the first such call of a function."""
POINTS = [
    (act, f"{side} {thing}")
    for act, things in ACTS.items()
    for thing in things
    for side in ("before", "after")
]


def context_of(step: str, folder: Path) -> StepContext:
    """What a step of a run that was prepared in a folder is given.

    `step` is its name, with `-classifier` for the run of one.
    """
    from tests.kit.pipeline_runs import evaluation_run, partition_run, training_run

    match step:
        case "train_model":
            return training_run.ReadyRun(folder, training_run.config()).context()
        case "train_model-classifier" | "evaluate_model-classifier":
            return training_run.ReadyRun(folder, training_run.classifier_config()).context()
        case "partition_users":
            return partition_run.context_of(partition_run.reserved_config(folder), folder)
        case _:
            return evaluation_run.FinishedRun(folder).context(evaluation_run.config())


def _points() -> dict[str, tuple[Any, str, int]]:
    """Name -> owner and name of a function, and before which call of it to stop."""
    from fedemb.ledger import Ledger
    from fedemb.partition import shards
    from fedemb.training import attempt, working_state
    from fedemb.training.working_state import RoundLog

    return {
        "a round": (RoundLog, "commit", 3),
        "a checkpoint": (working_state, "save_checkpoint", 1),
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
        "the figures of the model": (evaluate_model, "_embedded", 1),
        "the figures of the classifier": (evaluate_model, "measure_classifiers", 1),
        "the page": (evaluate_model, "utility_page", 1),
        "the utility report": (evaluate_model, "write_signed", 1),
    }


def _arm(
    owner: Any, name: str, *, stop_at: int = 1, after: bool = False, chosen: Chosen = _always
) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += chosen(*args, **kwargs)
        stops = chosen(*args, **kwargs) and calls == stop_at
        if stops and not after:
            os.kill(os.getpid(), signal.SIGSTOP)
        answer = original(*args, **kwargs)
        if stops and after:
            os.kill(os.getpid(), signal.SIGSTOP)
        return answer

    setattr(owner, name, stopping)


def main(step: str, point: str, folder: str) -> None:
    """See the module."""
    if point != "-" and step in ACTS:
        side, _, thing = point.partition(" ")
        owner, name, chosen = ACTS[step][thing]
        _arm(owner, name, after=side == "after", chosen=chosen)
    elif point != "-":
        owner, name, stop_at = _points()[point]
        _arm(owner, name, stop_at=stop_at)
    try:
        if step in ACTS:
            getattr(honest_run.at(Path(folder)), f"do_{step}")()
        else:
            logic = importlib.import_module(f"fedemb.steps.{step.partition('-')[0]}")
            logic.run(context_of(step, Path(folder)))
    except FedEmbError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
