"""Documents that a run writes are of the JSON schemas of their kinds."""

import json

import pytest
from jsonschema import Draft202012Validator

from fedemb.foundation.document import Part
from tests.kit.document_kinds import all_documents, json_schema

KINDS = {document.kind: document for document in all_documents()}


def test_field_with_a_default_is_no_field_of_a_document():
    with pytest.raises(TypeError, match=r"Loose\.more has a default"):
        type("Loose", (Part,), {"__annotations__": {"more": int}, "more": 0})


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
