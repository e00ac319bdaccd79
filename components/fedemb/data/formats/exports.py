"""Recognises exports that are not read as they are, and says how to convert them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedemb.data.formats.image_files import KNOWN_ENDINGS, is_side_file
from fedemb.errors import InputError
from fedemb.storage import open_store

_UNPACK = "Unpack it, and pass the folder."
_AS_PARQUET = "Write Parquet with the columns image (bytes of image files) and user_id."
_AS_CSV = "Write a CSV with the columns file and user_id, one row per image."
FILES = {
    "an archive": ((".zip", ".7z", ".rar", ".gz", ".bz2", ".xz", ".zst"), _UNPACK),
    "a table with tabs": ((".tsv", ".tab"), "Save it as CSV with commas."),
    "a spreadsheet": ((".xlsx", ".xls", ".ods"), "Save it as CSV with commas."),
    "a JSON file, such as COCO annotations": ((".json", ".jsonl", ".ndjson"), _AS_CSV),
    "an array or a table of another format": (
        (".arrow", ".feather", ".npz", ".npy", ".h5", ".hdf5", ".mat", ".pkl", ".pt"),
        _AS_PARQUET,
    ),
    "a photo catalogue": (
        (".lrcat", ".photoslibrary", ".aplibrary"),
        "Export the original photos, one folder per person.",
    ),
    "a single photo": (KNOWN_ENDINGS, "Pass the folder that has one folder per user."),
}
"""Kind of file -> its endings, and the remedy."""
_DATE = re.compile(
    r"(photos (from|of) )?(19|20)\d\d([-_. ]?[01]\d([-_. ]?[0-3]\d)?)?", re.IGNORECASE
)
_CAMERA = re.compile(r"\d{3}[a-z_]{5}", re.IGNORECASE)
"""Folder of a memory card, such as `100APPLE`."""
_SPLIT = re.compile(
    r"(train|val|valid|validation|test)(ing)?[-_]?(\d{4})?|annotations?|images?|labels?|masks?|data",
    re.IGNORECASE,
)


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

    One person in several such folders would be several users.

    Args:
      uri: address of the folder.
      names: names of its files.

    Raises:
      InputError: with the sentence that says how to arrange the files.
    """
    files = [name for name in names if not is_side_file(f"{name}/")]
    folders = sorted({name.partition("/")[0] for name in files if "/" in name})
    shown = ", ".join(map(repr, folders[:3]))
    if not folders:
        _refuse_loose(uri, files)
    elif all(_DATE.fullmatch(name) or _CAMERA.fullmatch(name) for name in folders):
        raise InputError(
            f"The folders of {uri} are dates ({shown}), not users. Put the whole export into one "
            "folder per person, or pass --format image_folder if each folder is one person."
        )
    elif len(folders) > 1 and all(map(_SPLIT.fullmatch, folders)):
        raise InputError(
            f"The folders of {uri} are parts of a data set ({shown}), not users. {_AS_CSV} Pass "
            "--format image_folder if each folder is one person."
        )


def _refuse_loose(uri: str, files: list[str]) -> None:
    archives = [name for name in files if name.lower().endswith(FILES["an archive"][0])]
    if archives:
        raise InputError(f"{uri} has archives, such as {archives[0]}, and no folders. {_UNPACK}")
    if any(not is_side_file(name) for name in files):
        raise InputError(
            f"All photos of {uri} are beside each other, so no photo has an owner. Put them into "
            f"one folder per person. {_AS_CSV.replace('Write', 'Or write')}"
        )
