"""The report is of its schema, and the schema is the golden one."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fedemb.documents.privacy_report_schema import check_schema, report_schema
from fedemb.errors import ArtifactError

GOLDEN = Path(__file__).parents[2] / "golden" / "privacy_report.schema.json"


def test_schema_is_the_golden_one(file_regression):
    text = json.dumps(report_schema(), indent=1, sort_keys=True) + "\n"
    file_regression.check(text, fullpath=GOLDEN)


@pytest.mark.parametrize("where", ["run", "v1"])
def test_reports_are_of_the_schema(good_run, where):
    golden = GOLDEN.parent / "v1" / "privacy_report.json"
    report = json.loads((good_run.report if where == "run" else golden).read_text())
    Draft202012Validator(report_schema()).validate(report)


def test_report_with_a_missing_or_further_field_is_not_signed(good_run):
    report = json.loads(good_run.report.read_text())
    report.pop("signature")
    check_schema(report)
    with pytest.raises(ArtifactError, match="mechanism"):
        check_schema({**report, "mechanism": {}})
    with pytest.raises(ArtifactError):
        check_schema({**report, "more": 1})
