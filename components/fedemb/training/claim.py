"""Which place trains an attempt: what the ledger is told, so that there is no second one.

The records of rounds are exclusive within one private root only. Two trainers of one reservation
with two roots would draw noise for the same rounds twice.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import commit_to
from fedemb.storage import Store

_NAME = "claim"


def claim(store: Store, key: bytes) -> str:
    """Marks the working state of an attempt as its own and returns a keyed commitment to it.

    It names the address and a random mark that lies there: neither a copy of the folder nor the
    same path on another machine is the same place.

    Args:
      store: working state of the attempt.
      key: the policy's key of commitments.
    """
    with suppress(FileExistsError):
        store.create(_NAME, secrets.token_bytes(32))
    root = store.local_root
    address = store.uri if root is None else root.resolve().as_posix()
    return commit_to(key, canonical_json(["private_root/1", address, store.read(_NAME).hex()]))
