"""`fedemb --help`: every command in one section, each on few lines."""

import typer.main
from typer.testing import CliRunner

from fedemb.pipelines.cli.main import app
from fedemb.pipelines.cli.sections import SECTIONS


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
