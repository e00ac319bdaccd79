"""What `fedemb verify` finds wrong with a bundle, and what two public files may differ in."""

import re
from pathlib import Path

from fedemb.release.verify import verify_release


def problems_of(bundle: str, trust: Path, ledger: str | None = None) -> list[str]:
    """Sentences; empty if the bundle is verified."""
    return list(verify_release(bundle, trust, ledger).problems)


def without_digests(path: Path) -> str:
    """Text of a file without its digests, keys and signatures, in whole or cut to their start."""
    text = re.sub(r'"(?=[\w+/=-]*\d)[\w+/=-]{16,}"', "", path.read_text())
    return re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b", "", text)
