"""Every kind of document has a schema, which is the golden one, and its own documents are of it."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fedemb.documents.classifier import ClassifiedPart
from fedemb.foundation.document import Part
from tests.kit.document_kinds import all_documents, fields_of, json_schema, parts_that_grew

GOLDEN = Path(__file__).parents[2] / "golden" / "documents"
FIELDS = Path(__file__).parents[2] / "golden" / "document_fields.json"
"""Digest of the fields of each version of each document: an entry is added, and never changed."""
KINDS = {document.kind: document for document in all_documents()}


@pytest.mark.parametrize("kind", KINDS)
def test_schema_is_the_golden_one(file_regression, kind):
    text = json.dumps(json_schema(KINDS[kind]), indent=1, sort_keys=True) + "\n"
    file_regression.check(text, fullpath=GOLDEN / f"{kind}.schema.json")


def _digest(document, version):
    return sha256("\n".join(fields_of(document, document.kind, version)).encode()).hexdigest()


def test_every_version_has_the_fields_it_was_written_with():
    """`make golden` does not write this file: a field more is a version more."""
    found = {
        f"{kind}/{version}": _digest(document, version)
        for kind, document in KINDS.items()
        for version in range(1, document.newest + 1)
    }
    assert found == json.loads(FIELDS.read_text()), "add an entry for the new version, by hand"


def test_field_with_a_default_is_no_field_of_a_document():
    with pytest.raises(TypeError, match=r"Loose\.more has a default"):
        type("Loose", (Part,), {"__annotations__": {"more": int}, "more": 0})


def test_field_added_without_a_version_is_seen():
    """Control for the list above."""

    class Grown(KINDS["verdict"]):
        more: int

    assert _digest(Grown, 1) != _digest(KINDS["verdict"], 1)


def test_part_with_a_field_of_a_later_version_belongs_to_one_kind():
    """A field counts the versions of the document around it; those of two kinds are two counts."""
    owners = {}
    for document in KINDS.values():
        for part in parts_that_grew(document):
            owners.setdefault(part, []).append(document.kind)
    assert {part.__name__: kinds for part, kinds in owners.items() if len(kinds) > 1} == {}
    assert owners[KINDS["classifier_report"]] == ["classifier_report"]
    assert owners[ClassifiedPart] == ["classifier_report"]


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
