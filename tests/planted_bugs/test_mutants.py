"""Every known bug, patched into a copy of the product, turns its tests red."""

import json
import subprocess
import sys

import pytest

from tests.planted_bugs.mutants import MUTANTS, SOUND
from tests.planted_bugs.mutation import REPOSITORY, planted


@pytest.fixture(scope="module")
def outcomes(request):
    """What became of every mutant that is asked for, in one process that forks."""
    asked = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    names = [mutant.name for mutant in MUTANTS if mutant.name in asked]
    command = [sys.executable, "-m", "tests.planted_bugs.mutation", *names]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(names), done.stderr[-3000:]
    return {line["name"]: line for line in lines}


def _case(place):
    """A bug as a case; the first of each family is quick to have, the others are slow."""
    mutant = MUTANTS[place]
    marks = [pytest.mark.planted_bug(mutant.number), pytest.mark.mutation]
    if mutant.number in {earlier.number for earlier in MUTANTS[:place] if earlier is not SOUND}:
        marks.append(pytest.mark.slow)
    return pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", map(_case, range(len(MUTANTS))))
def test_a_bug_in_the_product_turns_its_tests_red(mutant, outcomes, record_property):
    found = outcomes[mutant.name]
    assert found["caught_by"], found["output"]
    assert (found["caught_by"] == "nothing") == (mutant is SOUND), found["output"]
    record_property("planted", f"{mutant.name} | {mutant.where} | {found['caught_by']}")


def test_every_patch_fits_the_product(tmp_path):
    """A rewritten product needs its bugs written again, and says which."""
    for mutant in MUTANTS:
        planted(mutant, tmp_path / mutant.name)


def test_names_of_bugs_are_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
