"""`fedemb tune`: runs the pipeline as a private search over declared recipes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.options import MlflowOption, RunsOption, SetOption
from fedemb.pipelines.cli.run import NewRun, log_to_mlflow, start

KNOWN = ("mean_trials", "law", "recipes", "method")


@grouped
def tune(
    *,
    search: Annotated[
        Path,
        typer.Argument(
            help="YAML file of the search: recipes (name: settings), mean_trials, law, method."
        ),
    ],
    new: NewRun,
    set_: SetOption = None,
    runs: RunsOption = Path("runs"),
    mlflow: MlflowOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the price of the search; write nothing.")
    ] = False,
) -> None:
    """Release the best of a private search over recipes; charges the whole search first.

    Example: fedemb tune recipes.yaml --config mine.yaml --policy policy --dry-run
    """
    from fedemb.pipelines.run.command import execute

    overrides = [*(set_ or []), search_override(search)]
    directory = start(new, overrides, runs, dry_run=dry_run, await_approval=False)
    if directory is None:
        return
    with directory.alone():
        exit_code = execute(directory)
    if mlflow:
        log_to_mlflow(directory, mlflow)
    sys.exit(exit_code)


def search_override(path: Path) -> str:
    """Returns the override that declares a search in a configuration.

    Raises:
      InputError: the file cannot be read.
      ConfigError: the file is not a search.
    """
    fields = _read(path)
    unknown = sorted(map(str, fields.keys() - set(KNOWN)))
    if unknown or "recipes" not in fields or "mean_trials" not in fields:
        raise ConfigError(
            f"{path.name} has {', '.join(unknown) or 'no recipes or no mean_trials'}. Set "
            f"{', '.join(KNOWN)} only; recipes and mean_trials are required."
        )
    method = fields.pop("method", None) or f"private search over {len(fields['recipes'])} recipes"
    return "tuning=" + json.dumps({"data": "search", "method": method, "search": fields})


def _read(path: Path) -> dict[str, Any]:
    from fedemb.foundation.strict_yaml import NotYaml, parse_yaml

    try:
        fields = parse_yaml(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    except (NotYaml, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid YAML: {error}. Correct the file.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("recipes", {}), dict):
        raise ConfigError(
            f"{path.name} is not a search. Write mean_trials, and recipes as names with settings."
        )
    return fields
