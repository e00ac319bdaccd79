"""`fedemb --help`: every command in one section, each on few lines."""

import shlex

import pytest
import typer.main

from fedemb.pipelines.cli.main import app


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
