"""Options that several commands share, one wording each, and how they become values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fedemb.errors import InputError

if TYPE_CHECKING:
    from fedemb.pipelines.run.load_config import PolicyPlaces

ConfigOption = Annotated[
    str, typer.Option("--config", "-c", help="YAML file, or the name of a preset.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Setting to override, such as mechanism.rounds=20; repeatable.",
    ),
]
BeamOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="Option of Beam, such as --beam=--runner=X; repeatable, replaces earlier.",
    ),
]
DataOption = Annotated[str | None, typer.Option(help="Private images; replaces data.source.uri.")]
RunsOption = Annotated[Path, typer.Option(help="Folder of all runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command whose dataclass parameters are replaced by one option per field.

    Fields are declared as options of Typer: `Annotated[type, typer.Option(...)]` with a default.

    Args:
      command: function with keyword parameters; those annotated with a dataclass are groups.

    Raises:
      TypeError: two groups, or a group and the command, declare the same option.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups[name] = hint
            inner, empty = get_type_hints(hint, include_extras=True), inspect.Parameter.empty
            for field in dataclasses.fields(hint):
                default = empty if field.default is dataclasses.MISSING else field.default
                options.append(
                    parameter.replace(
                        name=field.name, default=default, annotation=inner[field.name]
                    )
                )
        else:
            options.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    names = [option.name for option in options]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{command.__name__} declares {', '.join(sorted(twice))} twice")

    @functools.wraps(command)
    def call(**values: Any) -> None:
        made = {
            name: group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
            for name, group in groups.items()
        }
        command(**made, **values)

    call.__signature__ = inspect.Signature(options)  # pyright: ignore[reportAttributeAccessIssue]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what libraries write to the standard error inside; errors are raised."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", help="Folder of the ledger and its keys; default: FEDEMB_POLICY."),
]
TrustOption = Annotated[
    Path | None, typer.Option("--trust", help="Pinned public keys: trust.json of the data owner.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """Options that name the keys of the owner of a release."""

    policy: PolicyOption = None
    trust: TrustOption = None

    def places(self, ledger: str | None = None) -> PolicyPlaces:
        """Returns the trust file, and the ledger if it is named or in a policy folder."""
        from fedemb.pipelines.run.load_config import PolicyPlaces

        return PolicyPlaces(ledger, trust=self.trust).in_folder(self.policy)


def require_released(bundle: Path, trust: str | Path) -> None:
    """Refuses a bundle that changed since its release, before anything in it is loaded.

    Checked: it has its files and no others; the ledger inside leads from the pinned keys to those
    that count; one of them signed the manifest; every file is what the manifest says.

    Raises:
      InputError: the bundle does not exist.
      SignatureInvalid: it is not what was released.
      ArtifactError: the pinned keys or the manifest cannot be read.
    """
    from fedemb.keys.trust import TrustStore
    from fedemb.release.bundle import check_origin

    if not bundle.is_dir():
        raise InputError(f"No release folder at {bundle}. Check the address.")
    check_origin(bundle, TrustStore.load(Path(trust)))
