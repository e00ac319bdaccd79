"""Every known bug, patched into a copy of the product, turns its tests red."""

import json
import subprocess
import sys

import pytest

from tests.planted_bugs.runner import RED, REPOSITORY, Edit, edited, mutants, patched

MUTANTS = mutants()
SOURCE = """
class Sum:
    def record(self, update):
        # Clip first.
        norm = length(
            update,
        )
        return scale(update, 1.0 / max(1.0, norm))

    def noised(self, total):
        return total + self.draw("sum")


def record(update):
    return update
"""


@pytest.mark.parametrize(
    ("function", "old", "new", "wanted"),
    [
        ("noised", 'self.draw("sum")', "0", "return total + 0"),
        ("noised", 'return total + self.draw("sum")', "", "pass"),
        ("Sum.record", "norm = length(update)", "norm = 0", "norm = 0"),
        ("Sum.record", "norm = length( update )\nreturn scale(update, 1.0 / max(1.0, norm))",
         "return update", "return update"),
        ("noised", "return total + self.draw('sum')", "total += 1\nreturn total", "total += 1"),
        ("", "total", "None", "None + self.draw"),
    ],
)  # fmt: skip
def test_mutant_edit_matches_code_in_any_formatting(function, old, new, wanted):
    text = edited(SOURCE, Edit("sums", function, old, new))
    assert wanted in text
    assert text.count("def ") == SOURCE.count("def ")
    compile(text, "sums.py", "exec")


@pytest.mark.parametrize(
    ("function", "old"),
    [("record", "update"), ("Sum", "update"), ("noised", "total - 1"), ("gone", "total")],
)
def test_code_that_is_missing_or_not_unique_is_an_error(function, old):
    with pytest.raises(ValueError, match=r"occurs \d|\d functions"):
        edited(SOURCE, Edit("sums", function, old, "None"))


@pytest.fixture(scope="module")
def planter():
    """A process that plants its mutants; each of several workers plants its share."""
    command = [sys.executable, "-m", "tests.planted_bugs.runner", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


def _case(place):
    """A bug as a case; the first of each family is quick to have, the others are slow."""
    mutant = MUTANTS[place]
    marks = [pytest.mark.planted_bug(mutant.number)]
    if mutant.number in {earlier.number for earlier in MUTANTS[1:place]}:
        marks.append(pytest.mark.slow)
    return pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.parametrize("mutant", map(_case, range(len(MUTANTS))))
def test_planted_bug_is_detected(mutant, planter):
    planter.stdin.write(f"{mutant.name}\n")
    planter.stdin.flush()
    found = json.loads(next(line for line in planter.stdout if line.startswith("{")))
    if mutant.edits:
        assert found["code"] == RED, found["output"]
        assert found["caught_by"], found["output"]
    else:
        assert found["code"] == 0, found["output"]


@pytest.mark.long
def test_every_mutant_applies_to_the_product():
    """A rewritten product needs its bugs written again, and says which."""
    for mutant in MUTANTS:
        patched(mutant)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.long
def test_every_test_that_must_turn_red_exists():
    wanted = {test for mutant in MUTANTS for test in mutant.tests}
    files = sorted({test.partition("::")[0] for test in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    ids = done.stdout.splitlines()
    there = {*ids, *(test.partition("[")[0] for test in ids), *(it.split("::")[0] for it in ids)}
    assert wanted - there == set()


def test_every_path_of_the_groups_of_mutation_exists():
    """A renamed package cannot drop out of the run."""
    from tests.mutation.run import GROUPS

    for code, tests in GROUPS.values():
        for place in (*(f"components/{it}" for it in code), *(f"tests/{it}" for it in tests)):
            assert (REPOSITORY / place).exists(), place
