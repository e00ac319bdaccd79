"""Recognises exports that are not read as they are, and says how to convert them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fedemb.data.formats.image_files import KNOWN_ENDINGS, is_side_file
from fedemb.errors import InputError
from fedemb.storage import open_store

_UNPACK = "Unpack it, and pass the folder."
_AS_PARQUET = "Write Parquet with the columns image (bytes of image files) and user_id."
_AS_CSV = "Write a CSV with the columns file and user_id, one row per image."
FILES = {
    "an archive": ((".zip", ".7z", ".rar", ".gz", ".bz2", ".xz", ".zst"), _UNPACK),
    "a table with tabs": ((".tsv", ".tab"), "Save it as CSV with commas."),
    "a text file": ((".txt", ".lst"), _AS_CSV),
    "a spreadsheet": ((".xlsx", ".xls", ".ods"), "Save it as CSV with commas."),
    "an array or a table of another format": (
        (
            *(".arrow", ".feather", ".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".pt"),
            *(".beton", ".lmdb", ".mdb", ".mds", ".rec", ".tfrec"),
        ),
        _AS_PARQUET,
    ),
    "a JSON file, such as COCO annotations": ((".json", ".jsonl", ".ndjson"), _AS_CSV),
    "a photo catalogue": (
        (".lrcat", ".photoslibrary", ".aplibrary"),
        "Export the original photos, one folder per person.",
    ),
    "a single photo": (KNOWN_ENDINGS, "Pass the folder that has one folder per user."),
}
"""Kind of file -> its endings, and the remedy."""
_DATE = (
    r"(photos (from|of) )?(19|20)\d\d([-_. ]?[01]\d([-_. ]?[0-3]\d)?)?|\d{3}[a-z_]{5}"
    r"|(19|20)\d\d[-_. ][01]\d[-_. ][0-3]\d [^\W\d].*"
    r"|(.*\W)?(\d\d?\.? [^\W\d]+|[^\W\d]+ \d\d?),? (19|20)\d\d"
)
"""Folder of a date (`2024-05`, `Rome, 1 May 2024`), or of a memory card (`100APPLE`)."""
_IN_ONE_FOLDER = (
    "Put the whole export into one folder per person, or pass --format image_folder if each folder "
    "is one person."
)
_AS_TABLE = f"{_AS_CSV} Pass --format image_folder if each folder is one person."


class _NotUsers(NamedTuple):
    """Names by which an export shows that its top folders are not users."""

    what: str
    pattern: str
    remedy: str
    all_match: bool
    """Whether all folders must match; else one of several."""


_NOT_USERS = (
    _NotUsers("are dates", _DATE, _IN_ONE_FOLDER, True),
    _NotUsers(
        "are parts of a data set",
        r"(train|val|valid|validation|test)(ing)?[-_]?(\d{4})?|annotations?|images?|labels?|masks?"
        r"|data|jpegimages|imagesets|segmentation(class|object)",
        _AS_TABLE,
        True,
    ),
    _NotUsers(
        "belong to a photo server",
        r"library|upload|thumbs|encoded-video|profile|backups|originals|import|storage|cache",
        "Pass the one that has one folder per user.",
        True,
    ),
    _NotUsers("are albums of one account", r"photos (from|of) (19|20)\d\d", _IN_ONE_FOLDER, False),
    _NotUsers(
        "are parts of one download",
        r"(takeout|drive-download)-\d{8}t\d{6}z.*|icloud photos part \d+ of \d+"
        r"|photos-\d-\d{3}.*",
        _IN_ONE_FOLDER,
        False,
    ),
    _NotUsers("are chats", r"whatsapp chat( with| -) .*", _AS_TABLE, False),
    _NotUsers(
        "belong to one phone",
        r"whatsapp (images|stickers|video|animated gifs|profile photos)|dcim|\d{3}apple"
        r"|camera (roll|uploads)",
        _IN_ONE_FOLDER,
        False,
    ),
)
_NO_CLASS = re.compile(
    f"{_DATE}|takeout|google photos|dcim|files|photos|pictures|originals|instantupload"
    r"|camera (roll|uploads)|whatsapp images|sent",
    re.IGNORECASE,
)
"""Folder of an export inside a user's folder, which is not a class that users share."""


def refuse_other_format(uri: str) -> None:
    """Refuses an address that is a file or a library of a known other format.

    Raises:
      InputError: with the sentence that says how to convert it.
    """
    lower = uri.lower().rstrip("/")
    for what, (endings, remedy) in FILES.items():
        if lower.endswith(endings):
            root = open_store(uri).local_root
            if root is not None and not root.exists():
                return
            if root is None or not root.is_dir() or what == "a photo catalogue":
                raise InputError(f"{uri} is {what}. Convert it first. {remedy}")


def refuse_folders_of_no_users(uri: str, names: Iterable[str]) -> None:
    """Refuses a folder whose folders are dates, splits or nothing, and so are not users.

    Args:
      uri: address of the folder.
      names: names of its files.

    Raises:
      InputError: with the sentence that says how to arrange the files.
    """
    files = _photos_and_others(names)
    if not any("/" in name for name in files):
        _refuse_loose(uri, files)
    elif found := _rule_of_folders(files):
        rule, shown = found
        raise InputError(
            f"The folders of {uri} {rule.what} ({shown}), not users. Move the photos by user. "
            f"{rule.remedy}"
        )


def folders_of_no_users(names: Iterable[str]) -> str:
    """Returns a sentence that says what the folders are instead of users; empty: nothing known.

    One person in several such folders would be several users. One folder is one user, unless it
    is a date; `init` warns that it is the only one.

    Args:
      names: names of files, relative to the folder of the users.
    """
    found = _rule_of_folders(_photos_and_others(names))
    if found is None:
        return ""
    rule, shown = found
    return (
        f"The folders {rule.what} ({shown}), and each counts as a user. If a person has photos in "
        "several, the guarantee does not hold for them: put the photos into one folder per person."
    )


def _photos_and_others(names: Iterable[str]) -> list[str]:
    return [name for name in names if not is_side_file(f"{name}/")]


def _rule_of_folders(files: Iterable[str]) -> tuple[_NotUsers, str] | None:
    """Returns the rule by which the top folders are not users, and the first folders it found."""
    folders = sorted({name.partition("/")[0] for name in files if "/" in name})
    for rule in _NOT_USERS:
        found = [name for name in folders if re.fullmatch(rule.pattern, name, re.IGNORECASE)]
        single = len(folders) == 1 and rule.what != "are dates"
        if found and not single and (len(found) == len(folders) or not rule.all_match):
            return rule, ", ".join(map(repr, found[:3]))
    return None


def has_classes(names: Iterable[str]) -> bool:
    """Returns whether the folders inside the users' folders can be classes that users share.

    Args:
      names: names of files, relative to the folder of the users.
    """
    inside = [name.split("/")[1:-1] for name in names if not is_side_file(name)]
    return any(inside) and not any(_NO_CLASS.fullmatch(part) for parts in inside for part in parts)


def refuse_no_photos(uri: str, names: Iterable[str]) -> None:
    """Refuses a folder with files of a known other format and no file named like a photo.

    Args:
      uri: address of the folder.
      names: names of its files.

    Raises:
      InputError: with the sentence that says how to convert the files.
    """
    files = list(names)
    if any(name.lower().endswith(KNOWN_ENDINGS) for name in files):
        return
    for what, (endings, remedy) in FILES.items():
        for name in files:
            if name.lower().endswith(endings):
                raise InputError(f"{uri} has {what}, {name}, and no photos. Convert it. {remedy}")


def _refuse_loose(uri: str, files: list[str]) -> None:
    refuse_no_photos(uri, files)
    photos = [name for name in files if name.lower().endswith(KNOWN_ENDINGS)]
    others = [name for name in files if not is_side_file(name)]
    if photos or others:
        kind = "All photos" if photos else f"All files, such as {others[0]},"
        raise InputError(
            f"{kind} of {uri} are beside each other, so no photo has an owner. Put the photos into "
            f"one folder per person. {_AS_CSV.replace('Write', 'Or write')} Convert files of other "
            "formats to Parquet."
        )
