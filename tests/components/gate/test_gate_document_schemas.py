"""Every kind of document has a schema, which is the golden one, and its own documents are of it."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tests.document_kinds import all_documents, json_schema

GOLDEN = Path(__file__).parents[2] / "golden" / "documents"
KINDS = {document.kind: document for document in all_documents()}


@pytest.mark.parametrize("kind", KINDS)
def test_schema_is_the_golden_one(file_regression, kind):
    text = json.dumps(json_schema(KINDS[kind]), indent=1, sort_keys=True) + "\n"
    file_regression.check(text, fullpath=GOLDEN / f"{kind}.schema.json")


def test_no_schema_is_left_of_a_kind_that_is_gone():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{kind}.schema.json" for kind in KINDS}


def test_documents_of_a_run_are_of_their_schemas(good_run):
    names = ("plan", "reservation", "users", "audit", "utility", "report", "verdict")
    paths = [getattr(good_run, name) for name in names]
    found = set()
    for path in (*paths, good_run.model / "model.json"):
        document = json.loads(path.read_text())
        kind = document["schema"].split("/")[1]
        Draft202012Validator(json_schema(KINDS[kind])).validate(document)
        found.add(kind)
    assert len(found) == 8
