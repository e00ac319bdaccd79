"""The generated pages of the reference are those of this code."""

import pytest

from tests.docs import generate


@pytest.fixture(scope="module")
def made():
    return generate.pages()


def test_generated_pages_are_current(made):
    """On failure run `make docs-reference`."""
    old = {name for name, text in made.items() if (generate.FOLDER / name).read_text() != text}
    assert not old, "run `make docs-reference`"


def test_every_command_and_option_is_in_the_reference(made):
    import typer

    for name, command in generate.commands(typer.main.get_command(generate.app)):
        section = made["cli.md"].partition(f"\n## fedemb {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for item in command.params:
            shown = item.name.upper() if item.param_type_name == "argument" else item.opts[0]
            assert item.hidden or item.name == "help" or f"`{shown}" in section, (name, shown)


def test_every_setting_is_in_the_reference_with_its_default(made):
    from fedemb.config import RunConfig

    page = made["configuration.md"]
    for section, field in RunConfig.model_fields.items():
        assert f"\n## {section}\n" in page or f"| `{section}` |" in page, field
    assert "| `training.server.learning_rate` | number, > 0" in page
    assert (
        "| `mechanism.rounds` | integer, > 0 | required |"
        in page.partition("### mechanism.kind: blt")[2]
    )


def test_every_rule_of_the_gate_is_in_the_reference(made):
    for code, _ in generate.RULES:
        assert f"\n| `{code}` | " in made["gate.md"]


def test_every_document_and_its_newest_version_is_in_the_reference(made):
    assert len(generate.documents()) > 12
    for document in generate.documents():
        assert (
            f"| [`{document.kind}`](#{document.kind}) | {document.newest} |" in made["documents.md"]
        )


def test_every_public_name_is_in_the_reference(made):
    import fedemb

    for name in fedemb.__all__:
        assert f"\n## {name}\n" in made["python.md"]
