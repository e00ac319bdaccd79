"""Commands that read finished runs and releases: runs, verify, register."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import ConfigError, InputError, Refused, StorageError
from fedemb.foundation.environment import require_modules
from fedemb.pipelines.cli.options import (
    JsonOption,
    Owner,
    RunsOption,
    grouped,
    quiet,
    require_released,
)
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.pipelines.run.pages import RunRow


def show_runs(
    run: Annotated[
        Path | None, typer.Argument(help="Run whose report to print; default: list all runs.")
    ] = None,
    runs: RunsOption = Path("runs"),
    json_: Annotated[
        bool, typer.Option("--json", help="Print the list, or the privacy report, as JSON.")
    ] = False,
    open_: Annotated[
        bool, typer.Option("--open", help="Open the page of the list, or the report, in a browser.")
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            help="Write parameters, metrics and reports to MLflow: http(s):// address of a "
            "tracking server."
        ),
    ] = None,
) -> None:
    """List the runs of a folder with verdict, epsilon and gain, or print the report of one.

    Example: fedemb runs week-1 --open
    """
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.pipelines.run.local import iter_runs
    from fedemb.pipelines.run.pages import run_row, tracked_run

    found = [RunDirectory.open(run, runs)] if run else list(iter_runs(runs))
    if not found:
        raise InputError(f"no run in {runs}; start one with `fedemb run`")
    if mlflow is not None:
        from fedemb.reports.mlflow import log_run

        say(*(f"mlflow: {run.run_id} is {log_run(tracked_run(run), mlflow)}" for run in found))
        return
    if run is not None:
        _show(found[0], json_=json_)
        page = found[0].index
    else:
        page = runs / "index.html"
        _list([run_row(each) for each in found], page if open_ else None, json_=json_)
    if open_:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            say("no browser could be started here; open that page where there is one")


def _show(run: RunDirectory, *, json_: bool) -> None:
    from fedemb.pipelines.run.directory import signed_report

    if not json_:
        say(*run.read_state().closing_lines, f"report: {run.index}")
    elif (signed := signed_report(run)) is None:
        raise InputError(f"run {run.run_id} has no privacy report yet; let it finish first")
    else:
        say_json(signed.json)


def _list(rows: list[RunRow], page: Path | None, *, json_: bool) -> None:
    """Prints runs as JSON or a table in text, and writes the page that lists them."""
    from fedemb.foundation.files import write_bytes
    from fedemb.reports.pages import RUN_COLUMNS, runs_page

    if json_:
        say_json([row.facts for row in rows])
    else:
        table = [RUN_COLUMNS[:5], *(row.cells[:5] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        say(*("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table))
    if page is not None:
        write_bytes(page, runs_page(page.parent, [row.cells for row in rows]).encode())
        say(f"page: {page}", err=json_)


@grouped
def verify_release(
    *,
    bundle: Annotated[
        str, typer.Argument(help="Release: a folder, or gs:// or s3://.../NAME/VERSION.")
    ],
    owner: Owner,
    ledger: Annotated[
        str | None, typer.Option(help="Root of the live ledgers; default: --policy, or the copy.")
    ] = None,
    skip_saved_model: Annotated[
        bool,
        typer.Option(
            "--skip-saved-model",
            help="Skip the rebuild of SavedModel and pages, which needs TensorFlow and kfp.",
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Verify a release offline: signature, digests, tensors, epsilon and ledger.

    Example: fedemb verify gs://models/photos/1.0 --trust trust.json
    """
    from fedemb.release.bundle import locate

    locate(bundle)  # reports typing errors before TensorFlow is loaded
    places = owner.places(ledger)
    if not skip_saved_model:
        _load_tensorflow()
    from fedemb.release.verify import verify_release

    found = verify_release(
        bundle, Path(places.named("trust")), places.ledger, rebuild=not skip_saved_model
    )
    if json_:
        answer = {
            "verified": not found.problems,
            "problems": found.problems,
            "skipped": ["saved_model", "pages"] if skip_saved_model else [],
            **found.facts,
        }
        say_json(answer)
    if found.problems:
        raise _not_verified(found.problems)
    if not json_:
        say("verified: {name} {version}, of run {run_id}".format(**found.facts))
        say("{headline}; {figures}".format(**found.facts))
        if "approved_by" in found.facts:
            say(f"approved by {found.facts['approved_by']}")
        say("guarantee: {guarantee}".format(**found.facts))
        if "all_runs" in found.facts:
            say(f"  {found.facts['all_runs']}")
        if places.ledger is None:
            say("ledger: copy in the bundle; pass --ledger to compare with the live ledger")
        if skip_saved_model:
            say("saved_model and pages: only digests checked, because of --skip-saved-model")


def _load_tensorflow() -> None:
    """Imports TensorFlow without its start-up messages.

    Raises:
      ConfigError: TensorFlow or what draws the pages is not installed.
    """
    from fedemb.models.keras_backend import load_keras

    try:
        require_modules("tensorflow", "kfp", "openlineage")
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}, or pass --skip-saved-model to check everything else"
        ) from error
    with quiet():
        load_keras()


@grouped
def register(
    *,
    bundle: Annotated[str, typer.Argument(help="Release, as for `fedemb verify`.")],
    to: Annotated[
        list[str],
        typer.Option(
            metavar="REGISTRY", help="mlflow+https://... or kubeflow+https://...; repeatable."
        ),
    ],
    owner: Owner,
) -> None:
    """Register a release in model registries (idempotent).

    Example: fedemb register BUNDLE --to mlflow+https://mlflow.example
    """
    from fedemb.release.bundle import locate
    from fedemb.release.registries import Release
    from fedemb.release.registries import register as tell
    from fedemb.storage import local_tree

    address = locate(bundle).address
    with local_tree(address) as tree:
        require_released(tree, owner.places().named("trust"))
        release = Release.of(tree, address)
    failed = []
    for registry in to:
        if problem := tell(release, registry):
            failed.append(f"{registry}: {problem}")
        else:
            say(f"{release.name} {release.version} is known to {registry}")
    if failed:
        raise StorageError("; ".join(failed))


def _not_verified(problems: tuple[str, ...]) -> Refused:
    if len(problems) == 1:
        return Refused(f"Verification failed: {problems[0]}. Do not use the file.")
    listed = (f"  - {problem}" for problem in problems)
    return Refused(
        f"Verification failed with {len(problems)} problems. Do not use the files.", *listed
    )
