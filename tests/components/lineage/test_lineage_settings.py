"""OpenLineage settings around a run change neither its lineage file nor what is sent of it."""

import json
from datetime import UTC, datetime

import pytest

from fedemb.reports import lineage

STEPS = [
    lineage.StepLineage("partition_users", {"raw_images": None}, {"users": "c" * 64}),
    lineage.StepLineage("train_dp_fedemb", {"users": "c" * 64}, {"model": "d" * 64}, failed=True),
]
DISABLED = {"OPENLINEAGE_DISABLED": "true"}
FACETS = "facets: {environment_variables: [SECRET_TOKEN]}"
SETTINGS = {
    "disabled": (DISABLED, None),
    "filter": ({"OPENLINEAGE__FILTERS": '[{"type": "exact", "match": "train_dp_fedemb"}]'}, None),
    "facets": ({"OPENLINEAGE__FACETS__ENVIRONMENT_VARIABLES": '["SECRET_TOKEN"]'}, None),
    "named file": ({"OPENLINEAGE_CONFIG": "named.yml"}, "named.yml"),
    "file in the folder": ({}, "openlineage.yml"),
}
"""Variables, and the name of a file of settings."""


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS.keys())
def settings(request, tmp_path, monkeypatch):
    """Applies settings when called, and says whether they disable the client."""
    variables, file = request.param

    def apply():
        monkeypatch.setenv("SECRET_TOKEN", "very secret")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if file is not None:
            (tmp_path / file).write_text(FACETS)
        monkeypatch.chdir(tmp_path)
        return variables is DISABLED

    return apply


def _write(path):
    time = datetime(2026, 1, 1, tzinfo=UTC)
    lineage.write(
        path,
        "run-1",
        STEPS,
        pipeline="dp-fedemb",
        config_sha="a" * 64,
        code_sha="b" * 64,
        time=time,
    )


def test_what_is_sent_is_the_file_or_nothing_if_disabled(settings, receiving, tmp_path):
    receiver = receiving()
    _write(tmp_path / "plain")
    disabled = settings()
    lineage.send((tmp_path / "plain").read_bytes)
    written = [json.loads(line) for line in (tmp_path / "plain").read_text().splitlines()]
    assert receiver.events == ([] if disabled else written)
