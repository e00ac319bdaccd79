"""Every term of the glossary is used, and public names have one term for one thing."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from fedemb.config import RunConfig
from fedemb.documents.ledger_record import BODIES
from fedemb.pipelines.cli.main import app
from tests.docs.test_docs import pages
from tests.kit.document_kinds import all_documents, fields_of

ROOT = Path(__file__).parents[2]
GLOSSARY = "docs/reference/glossary.md"
TERMS = re.findall(r"^\| (?!term|---)([^|]+?) \|", (ROOT / GLOSSARY).read_text(), re.MULTILINE)
FORMER = {
    "witness": "rollback_anchor",
    "look": "evaluation",
    "looks": "evaluations",
    "normaliser": "normalizer",
    "turn": "fencing token",
    "turns": "fencing token",
    "forgotten": "deleted",
    "people": "users",
}
"""Word that no public name holds -> the glossary's term."""


def test_every_term_of_the_glossary_is_used():
    others = [page for page in pages() if page != GLOSSARY]
    templates = (ROOT / "components/fedemb/reports/templates").glob("*.html")
    text = " ".join([*((ROOT / page).read_text() for page in others)])
    text = " ".join([text, *(path.read_text() for path in templates)]).lower()
    assert len(TERMS) > 40
    assert [term for term in TERMS if term.lower().strip("`") not in text] == []


def settings(model: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if hasattr(field.annotation, "model_fields"):
            yield from settings(field.annotation, f"{prefix}{name}.")


def options(command, prefix: str = "fedemb") -> Iterator[str]:
    """Commands with the names of their options."""
    yield from (f"{prefix} {name}" for item in command.params for name in item.opts)
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{prefix} {name}")


PUBLIC = {
    "settings": list(settings()),
    "options": list(options(typer.main.get_command(app))),
    "documents": [f"{kind.kind}.{name}" for kind in all_documents() for name in fields_of(kind)],
    "ledger records": list(BODIES),
}


@pytest.mark.parametrize("kind", PUBLIC)
def test_public_names_use_the_terms_of_the_glossary(kind):
    assert PUBLIC[kind]
    found = {
        name: FORMER[word]
        for name in PUBLIC[kind]
        for word in re.split(r"[^a-z]+", name.lower())
        if word in FORMER
    }
    assert found == {}
