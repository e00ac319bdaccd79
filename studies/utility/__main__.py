"""`python -m studies.utility`: the comparison of docs/explanation/results.md, on real images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedemb.pipelines.cli.main import errors_as_sentences


def study(
    data: Annotated[Path, typer.Option(help="The Omniglot background set, a Parquet file.")],
    cache: Annotated[Path, typer.Option(help="Folder of rows and report.")] = Path("runs/study"),
    budget: Annotated[float, typer.Option(min=0, help="Hours; later rows are not started.")] = 2.0,
    jobs: Annotated[int, typer.Option(min=0, help="Rows at a time; 0: one per core.")] = 0,
) -> None:
    """Choose recipes on validation users, then compare methods on unused test users."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from fedemb.foundation.cores import available_cores
    from studies.utility.grid import OMNIGLOT, base_config
    from studies.utility.report import write_report
    from studies.utility.run import Study, run_study

    work = Study(base_config(str(data)), OMNIGLOT, cache)
    decided = run_study(work, budget=3600 * budget, jobs=jobs or available_cores(), say=typer.echo)
    for line in write_report(work, decided):
        typer.echo(line)


if __name__ == "__main__":
    with errors_as_sentences():
        typer.run(study)
