"""The generated pages of the reference are those of this code."""

import re
import shlex

import pytest
import typer

from tests.docs import generate
from tests.docs.test_docs import ROOT, pages


def test_generated_pages_are_current():
    made = generate.pages().items()
    old = {name for name, text in made if (generate.FOLDER / name).read_text() != text}
    assert not old, "run `make docs-reference`"


COMMANDS = dict(generate.commands(typer.main.get_command(generate.app)))


def lines_of_commands(page: str) -> list[list[str]]:
    """Words of each `fedemb` command in the code blocks and the inline code of a page."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    blocks = re.findall(r"^ {4,}(?:.*\| )?(fedemb .*)$", text, re.MULTILINE)
    inline = re.findall(r"`(fedemb [a-z][^`]*)`", text)
    found = [re.split(r"  +#| # | > |; ", line)[0] for line in (*blocks, *inline)]
    return [shlex.split(line.replace("'", "").replace('"', "")) for line in found]


def wrong_with(words: list[str]) -> str:
    """What is wrong with a command: no such command, or no such option; empty if nothing is."""
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
    if name not in COMMANDS:
        groups = {command.split()[0] for command in COMMANDS if " " in command}
        known = name in {*groups, "COMMAND"} or name.startswith("-")
        return "" if known else f"unknown command {name}"
    options = {option for item in COMMANDS[name].params for option in item.opts}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return ", ".join(sorted(given - options - {"--help", "-h"}))


def test_pages_name_commands_and_options_that_exist():
    wrong = [
        f"{page}: {' '.join(words)}: {problem}"
        for page in pages()
        if page.startswith(("docs/", "README")) and "docs/reference/" not in page
        for words in lines_of_commands(page)
        if (problem := wrong_with(words))
    ]
    assert not wrong
    assert sum(len(lines_of_commands(page)) for page in pages()) > 100


@pytest.mark.parametrize("line", ["fedemb plant", "fedemb plan --epsilom 2", "fedemb run -x"])
def test_a_command_that_does_not_exist_is_found(line):
    assert wrong_with(line.split())
