"""Address and version of the private input: named by a reservation, checked by partition_users.

Only names, sizes and the versions a store keeps anyway are looked at, never a byte of an image.
What is derived from them is a keyed commitment: sizes and checksums of private files would tell the
adversary of the definition which of two data sets it was. The run's name is in it, or equal
commitments of two runs would tell that no data changed between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import commit_to
from fedemb.storage import Entry, open_store
from fedemb.storage.patterns import local_path, locate


def fingerprint_input(uri: str, key: bytes, run_id: str) -> str:
    """Binds the files at an address as they are now.

    Of objects in a bucket the name, size and version (MD5, ETag or generation) are bound: another
    content is another version. Of local files name and size: a copy of the same files must not
    burn a reservation, and the trainer binds the data themselves before round 0. Of a CSV source
    the mapping is bound, not the image files it names.

    Args:
      uri: `data.source.uri`; a file, folder or glob; local, gs:// or s3://.
      key: the policy's commitment key.
      run_id: name of the run.

    Returns:
      `<uri>#<commitment>`; the bare address if there is nothing at it.

    Raises:
      StorageError: the store cannot be listed.
    """
    listing = hashlib.sha256()
    found = False
    for entry in _entries(uri):
        found = True
        name = entry.name.encode(errors="backslashreplace").decode()  # may be no Unicode
        listing.update(canonical_json([name, entry.size, entry.version]) + b"\n")
    if not found:
        return uri
    return f"{uri}#{commit_to(key, canonical_json(['input/1', run_id, listing.hexdigest()]))}"


def _entries(uri: str) -> Iterator[Entry]:
    """The files at an address, in order, with names below the last folder without wildcards."""
    path = local_path(uri)
    if path is not None and path.is_file():
        yield Entry(path.name, path.stat().st_size, "")
    elif path is not None and path.is_dir():
        yield from open_store(path).entries()
    else:
        yield from locate(uri).entries()
