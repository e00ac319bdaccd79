"""kill -9 before every operation on files of every act on a policy; see `kills`."""

import json
from collections import Counter
from pathlib import Path

import kills
import pytest

from tests.kit.process import python

LEAST = {"reserve": 100, "release": 60, "rotate": 30}
"""Operations on files that an act has at least: a walk of none finds nothing."""


def _walk(folder: Path, step: int, *acts: str) -> list[dict]:
    said = python("-m", "tests.adversary.kills", folder, step, *acts, timeout=3600)
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.long
def test_repeated_command_after_a_kill_leaves_the_same_bytes(tmp_path):
    """A few of the kills of the long test below."""
    found = _walk(tmp_path, 50, *kills.ACTS)
    assert {kill["act"] for kill in found} == kills.ACTS.keys()
    assert [kill for kill in found if kill["problems"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("act", kills.ACTS)
def test_commands_killed_before_any_operation_can_be_repeated(tmp_path, act):
    found = _walk(tmp_path, 1, act)
    assert Counter(kill["act"] for kill in found)[act] >= LEAST.get(act, 5)
    assert [kill for kill in found if kill["problems"]] == []
