"""Whose bundles are used: keys that are pinned, or those of the run a bundle lies in."""

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
        help="Pinned keys from the data owner; default: the ledger's of the run it lies in.",
    ),
]


def require_released(bundle: Path, trust: Path | None) -> None:
    """Refuses a bundle before anything in it is loaded, unless it lies there as it was released.

    Checked: it has its files and no others; the ledger inside leads from the pinned keys to those
    that count; one of them signed the manifest; every file is what the manifest says. `fedemb
    verify` also decides again whether it should have been released.

    Raises:
      InputError: there is no bundle, or nothing says which keys to trust.
      SignatureInvalid: it is not what was released.
      ArtifactError: the pinned keys or the manifest cannot be read.
    """
    from fedemb.serving.bundle import check_origin

    if not bundle.is_dir():
        raise InputError(f"there is no release folder {bundle}; check the address")
    check_origin(bundle, trust_of(bundle, trust))


def trust_of(bundle: Path, given: Path | None) -> TrustStore:
    """The keys a bundle is held against: those given, or those of the run it lies in.

    Whose run that is goes to stderr.

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
            # Said each time: a folder that a stranger packed brings a stranger's keys.
            say(f"by the keys of run folder {folder}, yours; else name --trust", err=True)
            return read_trust(open_store(RunDirectory.open(folder).stores()["ledger"]))
    raise InputError(
        f"nothing says by whose keys {bundle} must be signed; name the trust.json that its owner "
        "gave with --trust or FEDEMB_TRUST"
    )
