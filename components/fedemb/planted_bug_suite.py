"""The record of the planted-bug suite: that tests of this very code find the bugs of dp.md 6.

A test that guards privacy is worth something only if it turns red on the bug it guards against. The
suite plants each known bug and demands red; `make planted-bugs` runs it and writes the record: for
a checkout at its first `make run`, for a wheel or an image when it is built. The record is never
committed and lies outside the code digest it names. A run for release is refused before it is
charged, and denied by the gate, where the record is missing, incomplete or of other code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fedemb
from fedemb.documents.artifacts import read_json, write_json
from fedemb.errors import ArtifactError

SCHEMA = "fedemb/planted_bug_suite/1"
RECORD = Path(fedemb.__file__).parent / "planted_bug_suite.json"
KNOWN_BUGS = 20
"""Of dp.md 6; the suite plants each at least once."""


def read_record() -> dict[str, Any]:
    """The record as packaged: `passed`, `total`, `code_sha`; the schema apart.

    Raises:
      ArtifactError: it is missing or no such record.
    """
    if not RECORD.is_file():
        raise ArtifactError(
            "the planted-bug suite was not run on this code: no record is packaged; run "
            "`make planted-bugs` in a checkout, or install a wheel or image that was built with it"
        )
    record = read_json(RECORD, SCHEMA)
    del record["schema"]
    return record


def write_record(path: Path, *, passed: int, total: int, code_sha: str) -> None:
    """Writes what a run of the suite found."""
    write_json(path, SCHEMA, {"passed": passed, "total": total, "code_sha": code_sha})


def record_problem(record: Any, code_sha: str) -> str | None:
    """What is wrong with a record, in a sentence; None if the suite passed on this code.

    Args:
      record: as of `read_record`, or a field of a document: it may be anything.
      code_sha: digest of the code that is to run, or ran.
    """
    if not isinstance(record, dict) or record.keys() != {"passed", "total", "code_sha"}:
        return "there is no record of the planted-bug suite"
    passed, total = record["passed"], record["total"]
    if type(passed) is not int or type(total) is not int:
        return "the record of the planted-bug suite holds no numbers of tests"
    if not passed == total >= KNOWN_BUGS:
        return (
            f"the planted-bug suite passed {passed} of {total} tests, expected all of at least "
            f"{KNOWN_BUGS}"
        )
    if record["code_sha"] != code_sha:
        return "the planted-bug suite was run on other code"
    return None


def main() -> int:
    """`python -m fedemb.planted_bug_suite`: 0 if the record is of the code at hand, else 1."""
    from fedemb.provenance import code_digest

    try:
        problem = record_problem(read_record(), code_digest())
    except ArtifactError as error:
        problem = str(error)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
