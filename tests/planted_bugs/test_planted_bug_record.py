"""The packaged record of the suite is of this code, and what it must say is not negotiable."""

import json
from pathlib import Path

import pytest

import fedemb
from fedemb.runtime.planted_bug_suite import KNOWN_BUGS, SCHEMA, record_problem
from fedemb.runtime.provenance import privacy_code_digest

PACKAGED = Path(fedemb.__file__).parent / "planted_bug_suite.json"
GOOD = {"passed": 50, "total": 50, "privacy_code_sha": "a" * 64}


@pytest.fixture(autouse=True)
def record_was_made(request):
    if "packaged" in request.node.name and not PACKAGED.is_file():
        pytest.skip("no record was made here; `make planted-bugs` writes it")


def packaged_problem():
    record = json.loads(PACKAGED.read_bytes())
    assert record.pop("schema") == SCHEMA
    return record_problem(record, privacy_code_digest())


@pytest.mark.long  # `make test-long` makes the record again for new code, and `make test` does not
def test_packaged_record_is_of_this_code():
    problem = packaged_problem()
    assert problem is None, f"{problem}. Run `make planted-bugs`"


def test_packaged_record_counts_all_planted_bugs(planted_bugs_collected):
    if packaged_problem() is not None:
        pytest.skip("the record was made of other code; `make planted-bugs` writes it")
    assert json.loads(PACKAGED.read_bytes())["total"] in planted_bugs_collected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"passed": 49}, "passed 49 of 50"),
        ({"passed": 51}, "passed 51 of 50"),
        ({"passed": 0, "total": 0}, "passed 0 of 0"),
        ({"passed": KNOWN_BUGS - 1, "total": KNOWN_BUGS - 1}, "at least"),
        ({"passed": float("nan"), "total": float("nan")}, "no numbers"),
        ({"passed": 50.0}, "no numbers"),
        ({"passed": True, "total": True}, "no numbers"),
        ({"privacy_code_sha": "b" * 64}, "other code"),
        ({"privacy_code_sha": None}, "other code"),
        ({"further": 1}, "was not run"),
    ],
)
def test_record_that_does_not_say_all_of_this_code_is_a_problem(changes, words):
    assert record_problem(GOOD, "a" * 64) is None
    assert words in record_problem({**GOOD, **changes}, "a" * 64)


@pytest.mark.parametrize("record", [None, {}, [], "passed", {"passed": 50, "total": 50}])
def test_no_record_is_a_problem(record):
    assert "was not run" in record_problem(record, "a" * 64)
