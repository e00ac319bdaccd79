"""The record of the planted-bug suite: the tests of this code detect the known bugs.

The bugs are listed in tests/planted_bugs/README.md.

The suite plants each known bug and requires that a privacy test fails. `make planted-bugs` runs the
suite and writes the record: for a checkout at its first `make run`, for a wheel or an image at
build time. The record is never committed. It contains the digest of the privacy-relevant code, so a
changed docstring or stylesheet leaves it valid. If the record is missing, incomplete or belongs to
other code, a release run is refused before it is charged and denied by the gate.

A throw-away run is exempt: its ledger serves this run only, and its images are the generated ones,
so no person's data is at risk. The report and the release say that the suite was not run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.config.data import BUILTIN
from fedemb.errors import ArtifactError, Refused
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.foundation.json_files import read_json, write_json
from fedemb.runtime.builtin_address import is_builtin_address

SCHEMA = "fedemb/planted_bug_suite/1"
RECORD = Path(__file__).parents[1] / "planted_bug_suite.json"
KNOWN_BUGS = 21
"""Number of bugs in tests/planted_bugs/README.md; the suite plants each at least once."""


def is_throw_away(config: RunConfig) -> bool:
    """Returns whether a run is exempt from the suite by its configuration.

    True only if the private images are those that `fedemb run` generates, and the configuration
    names no ledger that outlasts the run. `check_generated` compares the images themselves.
    """
    uri, size = config.data.source.uri, config.model.image_size
    generated = uri == BUILTIN or is_builtin_address(uri, config.data.builtin, size)
    return generated and config.storage.ledger is None


def record_for(config: RunConfig, privacy_code_sha: str) -> JsonObject:
    """Returns the packaged record, or one of 0 tests for a throw-away run without a valid record.

    Args:
      config: configuration of the run.
      privacy_code_sha: digest of the privacy-relevant code that will run.

    Raises:
      ArtifactError: the record is missing or invalid, and the run is not exempt.
    """
    if not is_throw_away(config):
        return read_record()
    try:
        record = read_record()
    except ArtifactError:
        record = {}
    if record_problem(record, privacy_code_sha) is None:
        return record
    return {"passed": 0, "total": 0, "privacy_code_sha": privacy_code_sha}


def check_generated(config: RunConfig) -> None:
    """Compares the private images of a throw-away run with the generated ones.

    Raises:
      Refused: the images differ.
    """
    from fedemb.data.glyphs import is_builtin_content

    path = Path(config.data.source.uri)
    if not is_builtin_content(path, config.data.builtin, config.model.image_size):
        raise Refused(
            f"{path} differs from the images that fedemb generates, and the planted-bug suite was "
            "not run on this code. Run `make planted-bugs`, or delete the file and run again."
        )


def read_record() -> JsonObject:
    """Returns the packaged record: `passed`, `total`, `privacy_code_sha`, without the schema.

    Raises:
      ArtifactError: the record is missing or invalid.
    """
    if not RECORD.is_file():
        raise ArtifactError(
            "The planted-bug suite was not run on this code. Run `make planted-bugs` in a "
            "checkout, or install a wheel or image that contains its record."
        )
    record = read_json(RECORD, SCHEMA)
    del record["schema"]
    return record


def write_record(path: Path, *, passed: int, total: int, privacy_code_sha: str) -> None:
    """Writes the result of the suite."""
    body = {"passed": passed, "total": total, "privacy_code_sha": privacy_code_sha}
    write_json(path, SCHEMA, body)


def record_problem(record: Json, privacy_code_sha: str | None) -> str | None:
    """Returns the problem of a record as a sentence; None if the suite passed on this code.

    Args:
      record: result of `read_record`, or an unchecked field of a document.
      privacy_code_sha: digest of the privacy-relevant code that will run; None if another version
          evaluates the record and cannot compute the digest.
    """
    if not isinstance(record, dict) or record.keys() != {"passed", "total", "privacy_code_sha"}:
        return "the planted-bug suite was not run"
    passed, total = record["passed"], record["total"]
    if type(passed) is not int or type(total) is not int:
        return "the record of the planted-bug suite has no numbers of tests"
    if not passed == total >= KNOWN_BUGS:
        return (
            f"the planted-bug suite passed {passed} of {total} tests, expected all of at least "
            f"{KNOWN_BUGS}"
        )
    if privacy_code_sha is not None and record["privacy_code_sha"] != privacy_code_sha:
        return "the planted-bug suite was run on other code"
    return None


def main() -> int:
    """Implements `python -m fedemb.runtime.planted_bug_suite`: 0 if the record is valid, else 1."""
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
