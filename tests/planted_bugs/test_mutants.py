"""Every known bug, patched into a copy of the product, turns its tests red."""

import json
import subprocess
import sys

import pytest

from tests.planted_bugs.mutants import MUTANTS, SOUND
from tests.planted_bugs.mutation import REPOSITORY, patched


@pytest.fixture(scope="module")
def planter():
    """A process that plants its mutants; each of several workers plants its share."""
    command = [sys.executable, "-m", "tests.planted_bugs.mutation", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


def _case(place):
    """A bug as a case; the first of each family is quick to have, the others are slow."""
    mutant = MUTANTS[place]
    marks = [pytest.mark.planted_bug(mutant.number), pytest.mark.mutation]
    if mutant.number in {earlier.number for earlier in MUTANTS[:place] if earlier is not SOUND}:
        marks.append(pytest.mark.slow)
    return pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.parametrize("mutant", map(_case, range(len(MUTANTS))))
def test_a_bug_in_the_product_turns_its_tests_red(mutant, planter, record_property):
    planter.stdin.write(f"{mutant.name}\n")
    planter.stdin.flush()
    found = json.loads(next(line for line in planter.stdout if line.startswith("{")))
    assert found["caught_by"], found["output"]
    assert (found["caught_by"] == "nothing") == (mutant is SOUND), found["output"]
    record_property("planted", f"{mutant.name} | {mutant.where} | {found['caught_by']}")


def test_every_patch_fits_the_product():
    """A rewritten product needs its bugs written again, and says which."""
    for mutant in MUTANTS:
        patched(mutant)


def test_names_of_bugs_are_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
