"""Address and version of the private input: bound by a reservation, checked by partition_users.

The fingerprint reads only names, sizes and the object versions of the store, never image bytes. It
is a keyed commitment, because sizes and checksums of private files would let the adversary of the
privacy definition distinguish two data sets. It includes the run ID, because equal commitments of
two runs would reveal that no data changed between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import commit_to
from fedemb.storage import Entry, open_store
from fedemb.storage.patterns import local_path, locate


def fingerprint_input(uri: str, key: bytes, run_id: str) -> str:
    """Returns a commitment to the current files at an address.

    For objects in a bucket, the name, size and version (MD5, ETag or generation) are bound, so
    other content is another version. For local files, only name and size are bound: a copy of the
    same files must not invalidate a reservation, and the trainer binds the data before round 0. For
    a CSV source, the mapping is bound, but not the image files that it names.

    Args:
      uri: `data.source.uri`; a file, folder or glob; local, gs:// or s3://.
      key: the policy's commitment key.
      run_id: name of the run.

    Returns:
      `<uri>#<commitment>`; only the address if it has no files.

    Raises:
      StorageError: the store cannot be listed.
    """
    listing = hashlib.sha256()
    found = False
    for entry in _entries(uri):
        found = True
        name = entry.name.encode(errors="backslashreplace").decode()  # may be invalid Unicode
        listing.update(canonical_json([name, entry.size, entry.version]) + b"\n")
    if not found:
        return uri
    return f"{uri}#{commit_to(key, canonical_json(['input/1', run_id, listing.hexdigest()]))}"


def _entries(uri: str) -> Iterator[Entry]:
    """Yields the files at an address, in order, named below the last folder without wildcards."""
    path = local_path(uri)
    if path is not None and path.is_file():
        yield Entry(path.name, path.stat().st_size, "")
    elif path is not None and path.is_dir():
        yield from open_store(path).entries()
    else:
        yield from locate(uri).entries()
