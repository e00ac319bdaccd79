"""The project stays within the limits of `budget.toml`, and no limit grows without a reason."""

import itertools
import subprocess

import pytest

from tests.architecture.budget import (
    LIMITS,
    ROOT,
    code_lines,
    limits,
    lowered,
    measure,
    raised_without_reason,
)


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def measured():
    return measure()


def test_no_measure_exceeds_its_limit(measured):
    allowed = limits(LIMITS.read_text())
    larger = {name: n for name, n in measured.items() if n > allowed.get(name, 0)}
    assert not larger, "Make it smaller, or raise its limit and say in the same line what it buys."


def test_no_limit_stays_after_its_subpackage_is_gone(measured):
    assert limits(LIMITS.read_text()).keys() <= measured.keys()


def test_no_limit_grew_without_a_reason():
    path = str(LIMITS.relative_to(ROOT))
    versions = [
        git("show", f"{commit}:{path}") for commit in git("log", "--format=%H", "--", path).split()
    ]
    texts = [LIMITS.read_text(), *versions]
    for newer, older in itertools.pairwise(texts):
        assert not raised_without_reason(older, newer)


def test_a_raised_limit_and_a_new_subpackage_need_a_reason():
    older = '"a" = 1\n"b" = 2\n"c" = 3\n'
    newer = '"a" = 2\n"b" = 3  # reads tar files\n"c" = 2\n"d" = 1\n'
    assert raised_without_reason(older, newer) == ["a", "d"]


def test_limits_are_lowered_and_never_raised():
    text = '# head\n"a" = 5\n"b" = 5  # why\n"gone" = 1\n'
    assert lowered(text, {"a": 6, "b": 4, "new": 1}) == '# head\n"a" = 5\n"b" = 4  # why\n'


def test_blank_lines_comments_and_docstrings_do_not_count_as_code():
    source = b'"""Module.\n\nText.\n"""\n\n# why\nx = (\n    1,\n)  # y\ndef f():\n    """One."""\n'
    assert code_lines(source) == 4
