"""Every term of the glossary is used, and public names have one term for one thing."""

import re
from pathlib import Path

from tests.docs.test_docs import pages

ROOT = Path(__file__).parents[2]
GLOSSARY = "docs/reference/glossary.md"
TERMS = re.findall(r"^\| (?!term|---)([^|]+?) \|", (ROOT / GLOSSARY).read_text(), re.MULTILINE)


def test_every_term_of_the_glossary_is_used():
    others = [page for page in pages() if page != GLOSSARY]
    templates = (ROOT / "components/fedemb/reports/templates").glob("*.html")
    text = " ".join([*((ROOT / page).read_text() for page in others)])
    text = " ".join([text, *(path.read_text() for path in templates)]).lower()
    assert len(TERMS) > 40
    assert [term for term in TERMS if term.lower().strip("`") not in text] == []
