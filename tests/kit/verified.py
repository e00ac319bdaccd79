"""What `fedemb verify` finds wrong with a bundle."""

from pathlib import Path

from fedemb.release.verify import verify_release


def problems_of(bundle: str, trust: Path, ledger: str | None = None) -> list[str]:
    """Sentences; empty if the bundle is verified."""
    return list(verify_release(bundle, trust, ledger).problems)
