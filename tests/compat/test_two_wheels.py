"""An older wheel and this one read the documents of each other; see `two_wheels`."""

import os
import subprocess

import pytest

from tests.compat.two_wheels import OLDER, REPOSITORY, compare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_older_and_newer_wheel_read_the_documents_of_each_other(tmp_path):
    reference = os.environ.get("FEDEMB_OLDER", OLDER)
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(f"no commit {reference} here; clone with history, or set FEDEMB_OLDER")
    assert compare(reference, tmp_path) == []
