"""Checks bundles with pinned keys before anything in them is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import InputError

TrustOption = Annotated[
    Path | None,
    typer.Option(
        "--trust", envvar="FEDEMB_TRUST", help="Trusted public keys, trust.json of the data owner."
    ),
]


def require_released(bundle: Path, trust: Path | None, *, insecure: bool = False) -> None:
    """Refuses a bundle that changed since its release, before anything in it is loaded.

    Checked: it has its files and no others; the ledger inside leads from the pinned keys to those
    that count; one of them signed the manifest; every file is what the manifest says. `fedemb
    verify` also decides again whether it should have been released. With `insecure` and without
    keys, only the folder must exist.

    Raises:
      InputError: the bundle does not exist, or no trusted keys were passed.
      SignatureInvalid: it is not what was released.
      ArtifactError: the pinned keys or the manifest cannot be read.
    """
    from fedemb.keys.trust import TrustStore
    from fedemb.serving.bundle import check_origin

    if not bundle.is_dir():
        raise InputError(f"No release folder at {bundle}. Check the address.")
    if trust is not None:
        check_origin(bundle, TrustStore.load(trust))
    elif not insecure:
        raise InputError(
            f"No public keys for {bundle}. Pass the trust.json of its owner with --trust or "
            "FEDEMB_TRUST."
        )
