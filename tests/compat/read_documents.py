"""Reads all documents below a folder with the package on the path, and prints how that ended.

    python tests/compat/read_documents.py FOLDER

Prints one JSON object on the last line: kind of document -> schema, outcome (`read`, `refused` or
`crashed`) and message of the first file that is not read, else of any file.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

READ, REFUSED, CRASHED = "read", "refused", "crashed"


def documents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Schema and bytes of every document: whole files, and the lines of JSON-lines files."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        for piece in data.splitlines() if path.suffix == ".jsonl" else (data,):
            try:
                schema = json.loads(piece)["schema"]
            except (ValueError, KeyError, TypeError):
                continue
            yield schema, piece


def classes() -> dict[str, type]:
    """Document class of each kind."""
    import fedemb.documents
    from fedemb.foundation.document import Document

    for module in pkgutil.iter_modules(fedemb.documents.__path__):
        importlib.import_module(f"fedemb.documents.{module.name}")
    return {item.kind: item for item in Document.__subclasses__()}


def outcome_of(act) -> tuple[str, str]:
    from fedemb.errors import FedEmbError

    try:
        act()
    except FedEmbError as error:
        return REFUSED, str(error)
    except Exception as error:
        return CRASHED, f"{type(error).__name__}: {error}"
    return READ, ""


def main(folder: Path) -> None:
    import fedemb
    from fedemb.foundation.document import parse
    from fedemb.keys.trust import TrustStore
    from fedemb.ledger import open_ledger

    known = classes()
    found: dict[str, dict[str, str]] = {}
    for schema, data in documents(folder):
        kind = schema.split("/")[1] if schema.count("/") == 2 else ""
        if kind not in known:
            continue
        outcome, message = outcome_of(lambda d=data, k=kind: parse(d, known[k], f"of kind {k}"))
        if kind not in found or outcome != READ:
            found[kind] = {"schema": schema, "outcome": outcome, "message": message}
    root = folder / "run" / "policy" / "ledger"
    outcome, message = outcome_of(
        lambda: open_ledger(
            str(root), "weekly", trust=TrustStore.load(root / "trust.json")
        ).verify()
    )
    found["whole ledger"] = {"schema": "-", "outcome": outcome, "message": message}
    print(json.dumps({"package": str(Path(fedemb.__file__).parent), "found": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
