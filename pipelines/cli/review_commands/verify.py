"""`fedemb verify`, `fedemb lineage`: is a release what it says, and where does it come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError, Refused, StorageError
from fedemb.foundation.extras import missing_extra
from fedemb.pipelines.cli.options import JsonOption, RunsOption
from fedemb.pipelines.cli.quiet import quiet
from fedemb.pipelines.cli.trusted import TrustOption, require_released
from fedemb.pipelines.output import say, say_json


def verify_release(
    bundle: Annotated[
        str, typer.Argument(help="Release: a folder, or gs:// or s3://.../NAME/VERSION.")
    ],
    trust: Annotated[
        Path,
        typer.Option("--trust", envvar="FEDEMB_TRUST", help="Pinned keys from the data owner."),
    ],
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", help="Root of the live ledgers; default: the copy in the bundle."),
    ] = None,
    skip_saved_model: Annotated[
        bool,
        typer.Option(
            "--skip-saved-model",
            help="Skip the rebuild of the SavedModel, which needs TensorFlow.",
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Verify a release offline: signature, digests, tensors, epsilon and ledger.

    Example: fedemb verify gs://models/photos/1.0 --trust trust.json
    """
    from fedemb.serving.bundle import locate

    locate(bundle)  # reports typing errors before TensorFlow is loaded
    if not skip_saved_model:
        _load_tensorflow()
    from fedemb.serving.verify import verify_release

    found = verify_release(bundle, trust, ledger, saved_model=not skip_saved_model)
    if json_:
        answer = {
            "verified": not found.problems,
            "problems": found.problems,
            "skipped": ["saved_model"] if skip_saved_model else [],
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
        if ledger is None:
            say("ledger: copy in the bundle; pass --ledger to compare with the live ledger")
        if skip_saved_model:
            say("saved_model: only signature and digest checked, because of --skip-saved-model")


def _load_tensorflow() -> None:
    """Imports TensorFlow without its start-up messages.

    Raises:
      ConfigError: TensorFlow is not installed.
    """
    from fedemb.models.keras_backend import load_keras

    try:
        with quiet():
            load_keras()
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        raise ConfigError(
            f"{missing.message}, or pass --skip-saved-model to check everything else"
        ) from error


def register(
    bundle: Annotated[str, typer.Argument(help="Release, as for `fedemb verify`.")],
    to: Annotated[
        list[str],
        typer.Option(help="mlflow+https://... or kubeflow+https://...; repeatable."),
    ],
    trust: TrustOption = None,
) -> None:
    """Register a release in model registries (idempotent).

    Example: fedemb register BUNDLE --to mlflow+https://mlflow.example
    """
    from fedemb.serving.bundle import locate
    from fedemb.serving.registries import Release
    from fedemb.serving.registries import register as tell
    from fedemb.storage import local_tree

    address = locate(bundle).address
    with local_tree(address) as tree:
        require_released(tree, trust)
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


def lineage(
    run: Annotated[
        str,
        typer.Argument(help="Run, release or lineage file; a path or address, or a run's name."),
    ],
    runs: RunsOption = Path("runs"),
    json_: JsonOption = False,
) -> None:
    """Print each step of a run with the artifacts that it read and wrote.

    Example: fedemb lineage week-1
    """
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.reports.lineage import read_steps, step_lines

    below = "://" not in run and not Path(run).exists()
    steps = read_steps(RunDirectory.open(Path(run), runs).root if below else run)
    if json_:
        say_json([vars(step) for step in steps])
        return
    say(*step_lines(steps))
