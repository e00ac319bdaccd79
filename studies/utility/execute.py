"""Runs rows in processes, within a budget; every finished row is one file, so a study resumes."""

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
from fedemb.foundation.digests import file_digest
from fedemb.foundation.json_files import read_json, write_json
from studies.utility.protocol import Protocol
from studies.utility.rows import Row

SCHEMA = "fedemb/study_row/1"
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

    def path(self, row: Row) -> Path:
        """File of a row's result, there or not."""
        split = self.protocol.split(row.stage)
        return self.cache / "rows" / f"{row.digest(self.base, self.data_sha, split)[:24]}.json"

    def result(self, row: Row) -> dict[str, Any] | None:
        """The cached result of a row, None if it has not been run.

        Raises:
          ArtifactError: the file is damaged.
        """
        path = self.path(row)
        return read_json(path, SCHEMA) if path.exists() else None

    def headline(self, row: Row) -> float | None:
        """Recall of a row at the first false accept rate, None if it has not been run."""
        found = self.result(row)
        return None if found is None else next(iter(found["recall"].values()))

    def run(self, row: Row) -> None:
        """Runs one row in this process and stores its result."""
        from studies.utility.train import run_row

        split = self.protocol.split(row.stage)
        found = run_row(row, self.base, split, self.protocol.column, self.cache)
        write_json(self.path(row), SCHEMA, {"row": asdict(row), **found})


def _run(study: Study, row: Row) -> None:
    study.run(row)


def estimate(study: Study, row: Row, rows: Iterable[Row]) -> float:
    """Seconds a row may take: the longest finished row of its method, else of any; 0 if none."""
    seconds: dict[str, float] = {}
    for other in rows:
        if found := study.result(other):
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
    distinct = {study.path(row): row for row in rows}  # two contests may share a training
    todo = [row for path, row in distinct.items() if not path.exists()]
    say(f"{len(distinct) - len(todo)} of {len(distinct)} rows are there, {len(todo)} to run")
    running: dict[Future[None], Row] = {}
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
                    future.result()
                    say(describe(row, study.result(row)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if todo:
        say(f"the budget ends here: {len(todo)} rows left; run the same command again")
    return todo


def describe(row: Row, found: dict[str, Any] | None) -> str:
    """A finished row in one line."""
    assert found is not None
    recall = " ".join(f"@{rate} {value:.3f}" for rate, value in found["recall"].items())
    last = found["last_rounds"]
    seen = f" norm {last['norm']:.2f} clipped {last['clipped']:.2f}" if last else ""
    noise = f" r={row.noise:g}" if row.noise else ""
    return (
        f"{row.stage} {row.net} {row.method}{noise} seed {row.seed} {row.label or '-'}: {recall} "
        f"1-NN {found['nearest_neighbour']:.3f}{seen} {found['seconds']:.0f} s"
    )
