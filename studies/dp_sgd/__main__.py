"""`python -m studies.dp_sgd`: runs the study of DP-SGD; resumes from the rows that it has."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import InputError
from fedemb.pipelines.cli.main import errors_as_sentences
from studies.table_file import TableFile

FILES = ("cifar10_train.parquet", "tinyimagenet32.parquet")


def study(
    data: Annotated[Path, typer.Option(help="Folder of the two Parquet files.")],
    cache: Annotated[
        Path, typer.Option(help="Folder of finished rows; the study resumes from it.")
    ] = Path("runs/study-dp-sgd"),
    budget: Annotated[float, typer.Option(min=0, help="Hours; later rows are not started.")] = 2.0,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each row.")] = 1,
    page: Annotated[
        Path | None, typer.Option(help="Folder for dp_sgd_study.md and its pictures.")
    ] = None,
) -> None:
    """Run the parts of the study that are not there yet, and write tables and pictures."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in FILES:
        if not (data / name).is_file():
            raise InputError(f"{data / name} does not exist; pass its folder as --data")
    from studies.dp_sgd.grid import rows
    from studies.dp_sgd.page import write_page
    from studies.dp_sgd.train import Data, run_row

    deadline = time.monotonic() + 3600 * budget
    wanted, results, table = rows(seeds), {}, TableFile(cache / "rows.jsonl")
    there = table.rows()
    for number, row in enumerate(wanted, start=1):
        if (found := there.get(row.digest)) is None:
            if time.monotonic() > deadline:
                continue
            found = run_row(row, Data(data, cache))
            table.put(row.digest, found)
            typer.echo(
                f"{number} of {len(wanted)}: {row.part}, {row.name}, {row.at:g}, seed {row.seed}: "
                f"{found['value']:.4g} in {found['seconds']:.0f} s"
            )
        results[row] = found
    missing = len(wanted) - len(results)
    if missing:
        typer.echo(f"{missing} rows are missing; run the same command again")
    write_page(page or cache, results, missing)


if __name__ == "__main__":
    with errors_as_sentences():
        typer.run(study)
