"""Image files by name, and what is wrong with some of them.

No name leads out of the folder of the images.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedemb.data.identity import Cell
from fedemb.data.photos import MAX_BYTES, BadImageError
from fedemb.errors import StorageError
from fedemb.foundation.files import read_at_most
from fedemb.storage import nameable, open_store

_SHOWN = 120


@dataclass(frozen=True)
class BadRecord:
    """Takes the place of the image in a batch; it is counted, whatever its other columns are."""

    reason: str
    """Code of the reason, see `fedemb.partition.check.BAD`."""
    read: str = ""
    """Text that was read, for the data owner. Private."""

    @classmethod
    def of(cls, reason: str, read: str | bytes) -> BadRecord:
        """Returns a bad record with an excerpt of the text or bytes that were read."""
        return cls(reason, excerpt(read))


def excerpt(read: str | bytes) -> str:
    r"""Returns the start of a value as a Python literal; bytes also as Latin-1 text.

    >>> print(excerpt("Smith, jr,a.jpg"), excerpt(b"Zo\xeb"))
    'Smith, jr,a.jpg' b'Zo\xeb' (as Latin-1 'Zoë')
    """
    short = read[:_SHOWN]
    more = "..." if len(read) > _SHOWN else ""
    if isinstance(short, str):
        return repr(short) + more
    latin = short.decode("latin-1")
    return repr(short) + more + (f" (as Latin-1 {latin!r})" if latin.isprintable() else "")


KNOWN_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".heic", ".gif"),
    *(".jfif", ".jpe", ".pjpeg", ".pjp", ".mpo", ".heif", ".hif", ".avif"),
)
"""Extensions that a table may omit from the name of an image file, common ones first."""

_ENDINGS = ("", *KNOWN_ENDINGS, *map(str.upper, KNOWN_ENDINGS))

_SIDE_FILES = (
    *(".3gp", ".avi", ".m4v", ".mkv", ".mov", ".mp", ".mp4", ".webm"),  # films, moving photos
    *(".aae", ".csv", ".html", ".json", ".jsonl", ".pdf", ".srt", ".txt", ".xml", ".xmp", ".zip"),
    *(".7z", ".gz", ".rar", ".tar", ".tgz"),
    *(".db", ".ini"),  # Thumbs.db, desktop.ini
    *(".idx", ".md", ".yaml", ".yml"),  # data sets
    *(".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".pef", ".raf", ".rw2"),  # raw photos
)
"""Extensions of non-photo files that phones, exports and desktops put next to photos."""

_SIDE_FOLDER = re.compile(
    r"(^|/)(#recycle|\$recycle\.bin|@recycle|lost\+found|@eadir|#snapshot|@recently-snapshot"
    r"|__macosx|system volume information"
    r"|files_trashbin|files_versions|appdata_[a-z0-9]+|__groupfolders"  # Nextcloud
    r"|[^/]+\.lrdata|[^/]+\.photoslibrary/(database|resources))/"
)
"""Folders that desktops, servers and catalogues create, such as recycle bins and thumbnails; lower
case."""


def is_side_file(name: str) -> bool:
    """Returns whether a file next to photos is not a photo, by its extension or folders.

    For all other files, the content decides.
    """
    lower = name.lower()
    return lower.endswith(_SIDE_FILES) or _SIDE_FOLDER.search(lower) is not None


def _read_inside(root: Path, name: str, *, own_folder: bool) -> bytes | None:
    """Returns the bytes of a regular file below a folder; None for other kinds of files.

    Other kinds are a pipe, a device, or a link that leads out of the folder. With `own_folder`,
    also a link that leads out of the first folder of its name, which belongs to one person.

    Opens the file without blocking, because a pipe without a writer would block a worker forever.
    """
    path = (root / name).resolve()
    inside = root / name.split("/", maxsplit=1)[0] if own_folder else root
    if not path.is_relative_to(inside.resolve()):
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return _whole(read_at_most(file, MAX_BYTES))


def _whole(data: bytes | None) -> bytes:
    if data is None:
        raise BadImageError("file_too_large")
    return data


def plain_name(name: str, root: str) -> str:
    """Returns a table's file name relative to the root, without `./`, `//` or the root itself."""
    for prefix in (f"{root}/", f"file://{root}/"):
        name = name.removeprefix(prefix)
    if name.startswith("/"):  # absolute, and not below the root
        return ""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


class ImageFiles:
    """Reads image files by name below a root; a missing file is a bad record, not a failure.

    Args:
      uri: address of the root.
      of_users: whether folders directly below the root are users. Links between them are not
        followed, because one person's photo would become a record of two users.
    """

    def __init__(self, uri: str, *, of_users: bool = False):
        self._store, self._of_users = open_store(uri), of_users
        self.missing = ""
        """First name without a file. Private."""

    def read(self, name: Cell) -> bytes:
        """Returns the bytes of `name`, or of `name` with an image extension.

        Raises:
          BadImageError: the file is missing or larger than `MAX_BYTES`; in users' folders, also a
            video or another non-photo file, which is not opened.
          StorageError: the store cannot be read.
        """
        if isinstance(name, BadRecord):
            raise BadImageError(name.reason)
        if not isinstance(name, str):
            raise BadImageError("image_missing")
        if self._of_users and is_side_file(name):
            raise BadImageError("side_file")
        for candidate in self._spellings(name):
            for ending in _ENDINGS:
                data = self._try(candidate + ending)
                if data is not None:
                    return data
        if name and not self.missing:
            self.missing = name
        raise BadImageError("image_missing")

    def _spellings(self, name: str) -> Iterator[str]:
        """Yields names below the root for a name in a table, the table's spelling first.

        No name leads out of the root or is hidden.
        """
        known = set[str]()
        for path in (name, name.replace("\\", "/")):
            for form in (path, *(unicodedata.normalize(kind, path) for kind in ("NFC", "NFD"))):
                found = plain_name(form, self._store.uri)
                parts = found.split("/")
                if found in known or any(not part or part.startswith(".") for part in parts):
                    continue
                known.add(found)
                yield found
                if len(parts) == 1 and len(found) > 3:  # GLDv2 keeps abcdef.jpg in a/b/c/
                    yield f"{found[0]}/{found[1]}/{found[2]}/{found}"

    def _try(self, name: str) -> bytes | None:
        root = self._store.local_root
        try:
            if root is None:
                return _whole(self._store.read_up_to(name, MAX_BYTES)) if nameable(name) else None
            return _read_inside(root, name, own_folder=self._of_users)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError, RuntimeError):
            return None  # RuntimeError: a loop of links, until Python 3.13
        except PermissionError as error:
            raise StorageError(
                f"an image file below {self._store.uri} is not readable. Fix the permissions."
            ) from error
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO):  # ENXIO: a socket
                return None
            raise StorageError(
                f"An image file below {self._store.uri} is not readable: {error.strerror}. "
                "Check its permissions and run again."
            ) from error
