"""A bundle that is signed as a release is, around a model of its own; the rest of it is empty."""

import json
from pathlib import Path

from fedemb.documents.verdict import Identity, ReleaseManifest
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import read
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer
from fedemb.release import bundle as parts
from fedemb.runtime.step_context import StepContext


def seal(context: StepContext, backbone: Path, folder: Path) -> str:
    """Writes a bundle of a model, under the keys of a run's ledger.

    Returns:
      The address of the bundle.
    """
    ledger, keys = context.ledger, context.keys
    for name in parts.ALL - {parts.MANIFEST}:
        write_bytes(folder / name, b"{}")
    write_bytes(folder / "backbone.keras", backbone.read_bytes())
    card = json.dumps({"weights_sha": file_digest(backbone)})
    write_bytes(folder / "model.json", card.encode())
    records = [ledger.chain.store.read(record.name) for record in ledger.chain.records]
    write_bytes(folder / "ledger.jsonl", b"".join(record + b"\n" for record in records))
    signer = Signer.current(keys, "release", ledger.chain.trust)
    parts.write_manifest(folder, Identity("embedding", "before", "before", 1), signer)
    return str(folder)


def seal_again(bundle, keys, ledger) -> None:
    """Signs a changed bundle, as the holder of the release key can."""
    identity = read(bundle / parts.MANIFEST, ReleaseManifest).body.identity
    (bundle / parts.MANIFEST).unlink()
    parts.write_manifest(bundle, identity, Signer.current(keys, "release", ledger.chain.trust))
