"""The record of the planted-bug suite: that tests of this very code find the bugs of dp.md 6.

A test that guards privacy is worth something only if it turns red on the bug it guards against. The
suite plants each known bug and demands red; `make planted-bugs` runs it and writes the record that
travels with the package. It lies outside the code digest it names. A run for release is refused
before it is charged, and denied by the gate, where the record is missing, incomplete or of other
code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fedemb
from fedemb.documents.artifacts import read_json, write_json

SCHEMA = "fedemb/planted_bug_suite/1"
RECORD = Path(fedemb.__file__).parent / "planted_bug_suite.json"
KNOWN_BUGS = 20
"""Of dp.md 6; the suite plants each at least once."""


def read_record() -> dict[str, Any]:
    """The record as packaged: `passed`, `total`, `code_sha`; the schema apart.

    Raises:
      ArtifactError: it is missing or no such record.
    """
    record = read_json(RECORD, SCHEMA)
    del record["schema"]
    return record


def write_record(path: Path, *, passed: int, total: int, code_sha: str) -> None:
    """Writes what a run of the suite found."""
    write_json(path, SCHEMA, {"passed": passed, "total": total, "code_sha": code_sha})


def record_problem(record: Any, code_sha: str) -> str | None:
    """What is wrong with a record, in a sentence; None if the suite passed on this code.

    Args:
      record: as of `read_record`, or a field of a document: believed to be anything.
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
