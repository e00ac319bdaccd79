"""Checks bundles before use: with pinned keys, or with the keys of the run that contains them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.keys.trust import TrustStore

TrustOption = Annotated[
    Path | None,
    typer.Option(
        "--trust",
        envvar="FEDEMB_TRUST",
        help="Trusted public keys from the data owner; default: those of the run that contains the "
        "file.",
    ),
]


def require_released(bundle: Path, trust: Path | None) -> None:
    """Refuses a bundle that changed since its release, before anything in it is loaded.

    Checked: it has its files and no others; the ledger inside leads from the pinned keys to those
    that count; one of them signed the manifest; every file is what the manifest says. `fedemb
    verify` also decides again whether it should have been released.

    Raises:
      InputError: the bundle does not exist, or no trusted keys are known.
      SignatureInvalid: it is not what was released.
      ArtifactError: the pinned keys or the manifest cannot be read.
    """
    from fedemb.serving.bundle import check_origin

    if not bundle.is_dir():
        raise InputError(f"No release folder at {bundle}. Check the address.")
    check_origin(bundle, trust_of(bundle, trust))


def trust_of(bundle: Path, given: Path | None) -> TrustStore:
    """Returns the keys to check a bundle with: those passed, or those of the run that contains it.

    The name of this run goes to stderr.

    Raises:
      InputError: neither.
      ArtifactError: they cannot be read.
    """
    from fedemb.keys.trust import TrustStore
    from fedemb.ledger import read_trust
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.storage import open_store

    if given is not None:
        return TrustStore.load(given)
    for folder in bundle.resolve().parents:
        if (folder / "config.yaml").is_file():
            # Printed each time: a folder from a stranger contains a stranger's keys.
            say(
                f"Using the public keys of the run folder {folder}. If you did not create this "
                "folder, pass --trust.",
                err=True,
            )
            return read_trust(open_store(RunDirectory.open(folder).stores()["ledger"]))
    raise InputError(
        f"No public keys found for {bundle}, which is not in a run folder. Pass the trust.json of "
        "its owner with --trust or FEDEMB_TRUST."
    )
