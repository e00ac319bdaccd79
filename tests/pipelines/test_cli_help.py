"""`fedemb --help`: every command in one section, each on few lines."""

import shlex

import pytest
import typer.main
from typer.testing import CliRunner

from fedemb.pipelines.cli.main import SECTIONS, app


def test_every_command_is_in_one_section_of_the_help():
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)


def test_help_shows_the_sections_with_a_whole_sentence_for_each_command():
    shown = CliRunner().invoke(app, ["--help"], terminal_width=100).output
    assert [shown.index(f"{title}:") for title in SECTIONS] == sorted(
        shown.index(f"{title}:") for title in SECTIONS
    )
    commands = shown[shown.index("Prepare:") :]
    assert "..." not in commands


def _commands(group, words=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*words, name))
        else:
            yield pytest.param((*words, name), command, id=" ".join((*words, name)))


@pytest.mark.parametrize(("words", "command"), _commands(typer.main.get_command(app)))
def test_help_ends_with_one_example_whose_options_exist(words, command):
    text, example = command.help.split("Example: ")
    assert text.strip()
    given = [word for word in shlex.split(example.split(" > ")[0]) if "FEDEMB_" not in word]
    assert tuple(given[: len(words) + 1]) == ("fedemb", *words)
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    passed = {word.split("=")[0] for word in given if word.startswith("-")}
    assert passed <= options
    required = [option for option in command.params if option.required]
    assert all(set(option.opts) & passed for option in required if option.opts[0].startswith("-"))
    assert all(option.help for option in command.params if option.name != "help")
