"""The prose check finds what it should, accepts what is plain, and covers every page."""

from fnmatch import fnmatch

import pytest

from tests.docs import plain_english
from tests.docs.plain_english import (
    ALLOWED,
    MOST_WORDS,
    PHRASES,
    ROOT,
    SKIPPED,
    findings,
    findings_in,
)

DIALECT = PHRASES["examples"]["dialect"]
PLAIN = PHRASES["examples"]["plain"]
CODE = PHRASES["examples"]["code"]
PAGE = PHRASES["examples"]["page"]


def found_in(text: str) -> list[str]:
    blocks = plain_english.blocks_of_page(text)
    return [finding.suggestion for finding in findings_in("page.md", blocks, long=True)]


@pytest.mark.parametrize("sentence", DIALECT)
def test_unclear_example_sentences_are_found(sentence):
    assert found_in(sentence)


@pytest.mark.parametrize("sentence", PLAIN)
def test_plain_english_is_accepted(sentence):
    assert not found_in(sentence)


def test_code_blocks_are_not_read_and_tables_and_lists_are():
    assert not found_in(PAGE["blocks"])
    assert len(found_in(PAGE["table_and_list"])) == 2


def test_long_sentences_and_paragraphs_are_found():
    assert found_in(" ".join(["word"] * (MOST_WORDS + 1)) + ".")
    assert found_in("This is short. " * 7)
    assert not found_in("This is short. " * 5)


def test_comments_docstrings_and_messages_of_code_are_read():
    blocks = plain_english.blocks_of_code(CODE)
    assert len(list(findings_in("a.py", blocks, long=False))) == 3


@pytest.mark.long
def test_all_pages_and_code_texts_pass_the_prose_check():
    assert findings() == []


def test_every_exception_is_needed_and_has_a_reason():
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.md")]
    for glob, reason in SKIPPED.items():
        assert any(fnmatch(name, glob) for name in names), glob
        assert len(reason.split()) > 3
    for item in ALLOWED:
        assert len(item.reason.split()) > 3
