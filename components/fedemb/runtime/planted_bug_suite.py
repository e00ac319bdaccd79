"""The record of the planted-bug suite: that tests of this code find the known bugs.

They are listed in tests/planted_bugs/README.md.

A test that guards privacy is worth something only if it turns red on the bug it guards against. The
suite plants each known bug and demands red; `make planted-bugs` runs it and writes the record: for
a checkout at its first `make run`, for a wheel or an image when it is built. The record is never
committed. It names the digest of what decides privacy, so a changed docstring or stylesheet leaves
it valid. A run for release is refused before it is charged, and denied by the gate, where the
record is missing, incomplete or of other code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fedemb.errors import ArtifactError
from fedemb.foundation.json_files import read_json, write_json

SCHEMA = "fedemb/planted_bug_suite/1"
RECORD = Path(__file__).parents[1] / "planted_bug_suite.json"
KNOWN_BUGS = 21
"""Of tests/planted_bugs/README.md; the suite plants each at least once."""


def read_record() -> dict[str, Any]:
    """The record as packaged: `passed`, `total`, `privacy_code_sha`; the schema apart.

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


def write_record(path: Path, *, passed: int, total: int, privacy_code_sha: str) -> None:
    """Writes what a run of the suite found."""
    body = {"passed": passed, "total": total, "privacy_code_sha": privacy_code_sha}
    write_json(path, SCHEMA, body)


def record_problem(record: Any, privacy_code_sha: str | None) -> str | None:
    """What is wrong with a record, in a sentence; None if the suite passed on this code.

    Args:
      record: as of `read_record`, or a field of a document: it may be anything.
      privacy_code_sha: digest of what decides privacy in the code that is to run; None where
        another version looks back, which cannot know it.
    """
    if not isinstance(record, dict) or record.keys() != {"passed", "total", "privacy_code_sha"}:
        return "there is no record of the planted-bug suite"
    passed, total = record["passed"], record["total"]
    if type(passed) is not int or type(total) is not int:
        return "the record of the planted-bug suite holds no numbers of tests"
    if not passed == total >= KNOWN_BUGS:
        return (
            f"the planted-bug suite passed {passed} of {total} tests, expected all of at least "
            f"{KNOWN_BUGS}"
        )
    if privacy_code_sha is not None and record["privacy_code_sha"] != privacy_code_sha:
        return "the planted-bug suite was run on other code"
    return None


def main() -> int:
    """`python -m fedemb.runtime.planted_bug_suite`: 0 if the record is of this code, else 1."""
    from fedemb.runtime.provenance import privacy_code_digest

    try:
        problem = record_problem(read_record(), privacy_code_digest())
    except ArtifactError as error:
        problem = str(error)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
