"""Runs rows in processes, within a budget; every finished row is one line, so a study resumes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedemb.config import RunConfig
from fedemb.errors import InputError
from fedemb.foundation.canonical_json import file_digest
from studies.table_file import TableFile
from studies.utility.protocol import Protocol
from studies.utility.rows import Row

Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """Subject of a study, and location of its results.

    Attributes:
      base: data, model and public backbone of all rows.
      protocol: which users train, validate and test.
      cache: folder of results.
    """

    base: RunConfig
    protocol: Protocol
    cache: Path
    data_sha: str = field(init=False)

    def __post_init__(self) -> None:
        """Computes the digest of the images once.

        Raises:
          InputError: the images are not a local file.
        """
        path = Path(self.base.data.source.uri)
        if not path.is_file():
            raise InputError(
                f"the study reads one local file, and {path} is not one; name the Omniglot Parquet "
                "file with --data"
            )
        object.__setattr__(self, "data_sha", file_digest(path))

    @property
    def table(self) -> TableFile:
        """Results of all rows."""
        return TableFile(self.cache / "rows.jsonl")

    def key(self, row: Row) -> str:
        """Name of a row's result in the table, there or not."""
        return row.digest(self.base, self.data_sha, self.protocol.split(row.stage))[:24]

    def results(self, rows: Iterable[Row]) -> list[tuple[Row, dict[str, Any]]]:
        """The rows that have been run, with their results.

        Raises:
          ArtifactError: the table is damaged.
        """
        found = self.table.rows()
        return [(row, found[key]) for row in rows if (key := self.key(row)) in found]

    def result(self, row: Row) -> dict[str, Any] | None:
        """The result of a row, None if it has not been run."""
        return next((found for _, found in self.results([row])), None)

    def headline(self, row: Row) -> float | None:
        """Recall of a row at the first false accept rate, None if it has not been run."""
        found = self.result(row)
        return None if found is None else next(iter(found["recall"].values()))


def _run(study: Study, row: Row) -> dict[str, Any]:
    from studies.utility.train import run_row

    split = study.protocol.split(row.stage)
    found = run_row(row, study.base, split, study.protocol.column, study.cache)
    return {"row": asdict(row), **found}


def estimate(study: Study, row: Row, rows: Iterable[Row]) -> float:
    """Seconds a row may take: the longest finished row of its method, else of any; 0 if none."""
    seconds: dict[str, float] = {}
    for other, found in study.results(rows):
        seconds[other.method] = max(found["seconds"], seconds.get(other.method, 0.0))
    return seconds.get(row.method, max(seconds.values(), default=0.0))


def execute(
    study: Study, rows: Sequence[Row], *, budget: float, jobs: int, say: Say = print
) -> list[Row]:
    """Runs the rows that have no result yet, in order, several at once.

    Args:
      study: what and where.
      rows: in order of what they teach.
      budget: seconds after which nothing more should run; a row that would pass it is not started.
      jobs: processes, one core each.
      say: told of every row, in one line.

    Returns:
      The rows that were left out for the budget.
    """
    deadline = time.monotonic() + budget
    distinct = {study.key(row): row for row in rows}  # two contests may share a training
    there = study.table.rows()
    todo = [row for key, row in distinct.items() if key not in there]
    say(f"{len(distinct) - len(todo)} of {len(distinct)} rows are there, {len(todo)} to run")
    running: dict[Future[dict[str, Any]], Row] = {}
    context = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        try:
            while todo or running:
                while todo and len(running) < jobs:
                    if time.monotonic() + estimate(study, todo[0], rows) > deadline:
                        break
                    row = todo.pop(0)
                    running[pool.submit(_run, study, row)] = row
                if not running:
                    break
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    row = running.pop(future)
                    study.table.put(study.key(row), future.result())
                    say(describe(row, future.result()))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if todo:
        say(f"the budget ends here: {len(todo)} rows left; run the same command again")
    return todo


def describe(row: Row, found: dict[str, Any]) -> str:
    """A finished row in one line."""
    recall = " ".join(f"@{rate} {value:.3f}" for rate, value in found["recall"].items())
    last = found["last_rounds"]
    seen = f" norm {last['norm']:.2f} clipped {last['clipped']:.2f}" if last else ""
    noise = f" r={row.noise:g}" if row.noise else ""
    return (
        f"{row.stage} {row.net} {row.method}{noise} seed {row.seed} {row.label or '-'}: {recall} "
        f"1-NN {found['nearest_neighbour']:.3f}{seen} {found['seconds']:.0f} s"
    )
