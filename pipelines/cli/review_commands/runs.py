"""`fedemb runs`: lists the runs of a folder or an artifact store, and compares two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.options import MlflowOption
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.pipelines.run.directory import RunDirectory


def list_runs(
    folder: Annotated[
        str, typer.Argument(help="Folder of all runs, or artifact store (gs://, s3://, path).")
    ] = "runs",
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="RUN RUN", help="Two runs to compare, by name or directory."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="HTML page to write the comparison to; needs --compare.")
    ] = None,
    mlflow: MlflowOption = None,
) -> None:
    """List the runs of a folder with verdict, epsilon and gain, newest first, or compare two.

    Example: fedemb runs --compare week-1 week-2 --page comparison.html
    """
    from fedemb.pipelines.cli.review_commands.results import runs_table

    if page is not None and compare is None:
        raise InputError("--page writes a comparison. Pass two runs by --compare.")
    if mlflow is not None and compare is not None:
        raise InputError("--mlflow writes the listed runs. Drop --compare or --mlflow.")
    with _copies() as copies:
        if compare is not None:
            first, second = compare
            if first == second:
                raise InputError(f"--compare got {first} twice. Pass two different runs.")
            _compare(_named(folder, first, copies), _named(folder, second, copies), page)
            return
        found = list(_all(folder, copies))
        if not found:
            raise InputError(f"no run in {folder}; start one with `fedemb run`")
        say(*runs_table(found))
        if mlflow is not None:
            from fedemb.pipelines.run.mlflow_run import log_run

            say(*(log_run(run, mlflow) for run in found))


@contextmanager
def _copies() -> Iterator[Path]:
    """A folder for the documents of published runs."""
    with TemporaryDirectory(prefix="fedemb-runs-") as folder:
        yield Path(folder)


def _all(folder: str, copies: Path) -> Iterator[RunDirectory]:
    from fedemb.pipelines.run.local import iter_runs
    from fedemb.pipelines.run.published import is_artifact_store, published_runs

    if is_artifact_store(folder):
        yield from published_runs(folder, copies, lambda why: say(f"skipped: {why}", err=True))
    else:
        yield from iter_runs(Path(folder))


def _named(folder: str, name: str, copies: Path) -> RunDirectory:
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.pipelines.run.published import is_artifact_store, published_run

    if is_artifact_store(folder):
        return published_run(folder, name, copies)
    return RunDirectory.named(Path(name), Path(folder))


def _compare(first: RunDirectory, second: RunDirectory, page: Path | None) -> None:
    from fedemb.pipelines.run.compare import compared_run
    from fedemb.reports.comparison import comparison_lines, comparison_page

    sides = compared_run(first), compared_run(second)
    say(*comparison_lines(*sides))
    if page is not None:
        write_bytes(page, comparison_page(*sides).encode())
        say(f"page: {page.resolve()}")
