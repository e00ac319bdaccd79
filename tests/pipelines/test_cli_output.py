"""Text of others is shown on the terminal and never obeyed."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.errors import Refused
from fedemb.pipelines.cli.main import errors_as_sentences
from fedemb.pipelines.output import escaped, say, say_block, say_json


@given(st.text())
def test_escaped_text_is_one_visible_line(text):
    shown = escaped(text)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(shown.splitlines()) <= 1
    shown.encode()


def test_names_in_output_are_escaped_to_one_line(capsys):
    say("alike: \x1b[2J\rverified\nverified: model 1", "next", "")
    assert capsys.readouterr().out == "alike: \\x1b[2J\\rverified\\nverified: model 1\nnext\n\n"


def test_escaping_keeps_block_lines_and_json_values(capsys):
    say_block("a: 1\nb: \x1b\n")
    say_json({"name": "\x1b\n"}, indent=None)
    assert capsys.readouterr().out == 'a: 1\nb: \\x1b\n{"name": "\\u001b\\n"}\n'


def test_control_characters_in_errors_and_details_are_escaped(capsys):
    with pytest.raises(SystemExit) as stopped, errors_as_sentences():
        raise Refused("not verified: a\r\x1b[8m", "  - extra \nverified", "  - b")
    assert stopped.value.code == 3
    shown = capsys.readouterr().err
    assert shown == "Refused: not verified: a\\r\\x1b[8m\n  - extra \\nverified\n  - b\n"


def test_text_of_an_unexpected_error_is_escaped(capsys):
    with pytest.raises(SystemExit) as stopped, errors_as_sentences():
        raise RuntimeError("\x1b[2J")
    assert stopped.value.code == 1
    shown = capsys.readouterr().err
    assert "bug in fedemb" in shown
    assert "RuntimeError" in shown
    assert "\x1b" not in shown


def test_output_escapes_letters_outside_its_encoding(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        say("Zoë")
    assert (tmp_path / "out").read_text() == "Zo\\xeb\n"
