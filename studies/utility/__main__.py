"""`python -m studies.utility`: the comparison of docs/explanation/results.md, on real images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedemb.pipelines.cli.main import errors_as_sentences


def study(
    data: Annotated[Path, typer.Option(help="The Omniglot background set, a Parquet file.")],
    cache: Annotated[
        Path, typer.Option(help="Folder of finished rows and of the report; resumes from it.")
    ] = Path("runs/study"),
    budget: Annotated[
        float, typer.Option(min=0, help="Hours; a row that would pass them is not started.")
    ] = 2.0,
    jobs: Annotated[
        int, typer.Option(min=0, help="Rows at a time, one core each; 0: one per core.")
    ] = 0,
    ablations: Annotated[
        bool, typer.Option(help="Also change one thing of the chosen recipe at a time.")
    ] = False,
) -> None:
    """Choose recipes on validation users, then compare methods on unused test users."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from fedemb.models.keras_backend import available_cores
    from studies.utility.decide import run_study
    from studies.utility.execute import Study
    from studies.utility.grid import base_config
    from studies.utility.protocol import OMNIGLOT
    from studies.utility.write import write_report

    work = Study(base_config(str(data)), OMNIGLOT, cache)
    decided = run_study(
        work,
        budget=3600 * budget,
        jobs=jobs or available_cores(),
        with_ablations=ablations,
        say=typer.echo,
    )
    for line in write_report(work, decided):
        typer.echo(line)


if __name__ == "__main__":
    with errors_as_sentences():
        typer.run(study)
