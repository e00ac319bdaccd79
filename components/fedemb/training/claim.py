"""Claims the private root that trains an attempt, for the ledger.

Round records are exclusive only within one private root. Two trainers of one reservation with two
private roots would draw noise for the same rounds twice. The ledger therefore accepts one claim.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import commit_to
from fedemb.storage import Store

_NAME = "claim"


def claim(store: Store, key: bytes) -> str:
    """Claims the working state of an attempt and returns a keyed commitment to it.

    The commitment covers the address and a random marker stored there. A copy of the folder, and
    the same path on another machine, give different commitments.

    Args:
      store: working state of the attempt.
      key: the policy's commitment key.
    """
    with suppress(FileExistsError):
        store.create(_NAME, secrets.token_bytes(32))
    root = store.local_root
    address = store.uri if root is None else root.resolve().as_posix()
    return commit_to(key, canonical_json(["private_root/1", address, store.read(_NAME).hex()]))
