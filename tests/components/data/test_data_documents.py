"""Documents between steps: strict JSON of a known schema, or one sentence."""

import pytest

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import parse_json
from fedemb.foundation.document import read_json

SCHEMA = "fedemb/thing/1"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_refused_wherever_it_stands(number):
    text = '{"schema": "%s", "nested": [{"epsilon": %s}]}'
    assert parse_json((text % (SCHEMA, "1.5")).encode(), SCHEMA, "thing.json")
    with pytest.raises(ArtifactError, match=r"thing\.json.*not a number"):
        parse_json((text % (SCHEMA, number)).encode(), SCHEMA, "thing.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "has schema None"),
        (b'{"schema": "fedemb/thing/2"}', "expected 'fedemb/thing/1'"),
    ],
)
def test_what_is_no_such_document_is_named(data, words):
    with pytest.raises(ArtifactError, match=words):
        parse_json(data, SCHEMA, "thing.json")


def test_missing_document_says_who_writes_it(tmp_path):
    with pytest.raises(ArtifactError, match=r"thing\.json is missing.*run the step"):
        read_json(tmp_path / "thing.json", SCHEMA)
