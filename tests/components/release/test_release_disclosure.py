"""The disclosure states signed fields in the fields of the standards, and leaves others open."""

import json
import shutil

import pytest
import yaml

from fedemb.documents.privacy_report import PrivacyReport
from fedemb.errors import FedEmbError, InputError
from fedemb.foundation.document import read
from fedemb.keys.signatures import Signer
from fedemb.pipelines.cli.main import app
from fedemb.steps.release_model.disclosure import PUBLISHER
from tests.kit.pipeline_runs import honest_run

TEMPLATE = {
    "basic": (
        "name",
        "data_curators.data_curator_name",
        "data_curators.data_curator_type",
        "description",
        "intended_use",
        "data_product_type",
        "data_product_region",
        "data_product_sector",
        "publication_date",
    ),
    "dp_variant": (
        "variant_name",
        "data_domain",
        "unprotected_quantities",
    ),
    "privacy_loss": (
        "privacy_unit",
        "privacy_unit_details",
        "privacy_parameters.epsilon",
        "privacy_parameters.delta",
        "privacy_parameters_details",
    ),
    "deployment_model": (
        "model_name",
        "model_name_details",
        "trust_assumptions",
        "actors",
        "release_type",
        "release_type_details",
        "data_source_type",
        "data_source_type_details",
        "access_type",
        "access_type_details",
    ),
    "implementation": (
        "preprocessing_and_hyperparameter_tuning",
        "mechanisms",
        "composition",
        "post_processing",
        "justification",
        "utility",
        "additional_information",
    ),
    "administrative": (
        "evidence_sources",
        "status",
        "registry_authors",
        "tier",
    ),
}
"""Fields of the registry's template, without `number_of_privacy_units` (a lower bound is known) and
with the parameters of approximate differential privacy only."""
LICENCE = "<script>alert(1)</script> [free](http://x)"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    release = {**honest_run.config().release.model_dump(), "licence": LICENCE}
    return honest_run.start(tmp_path_factory.mktemp("run") / "run", release=release).until_release()


def bundle(run):
    return run.root / "releases" / "glyphs" / "1.0"


def disclose(run, folder, where=None):
    trust = f"{run.ledger_uri}/trust.json"
    words = ["disclose", where or bundle(run), "-o", folder, "--trust", trust]
    app(args=[str(word) for word in words], standalone_mode=False)
    return json.loads((folder / "disclosure.json").read_text())


def paths(value, path=""):
    if isinstance(value, dict):
        for name, item in value.items():
            yield from paths(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, path)
    else:
        yield path


def test_parameters_are_those_of_the_signed_report(run, tmp_path):
    found, report = disclose(run, tmp_path / "one"), read(run.report, PrivacyReport)
    body = report.body
    assert found["release"]["privacy_report_sha"] == report.sha
    assert found["release"]["state"] == "Released"
    parameters = found["parameters"]
    assert parameters["epsilon"] == body.accounting.epsilon
    assert parameters["cumulative_epsilon"] == body.cumulative.max_block_epsilon
    assert parameters["noise_multiplier"] == body.mechanism.noise_multiplier == 2.0
    assert parameters["unit"] == "user"
    entry = found["deployment_registry"]["deployment"]
    assert entry["privacy_loss"]["privacy_parameters"] == {
        "epsilon": body.accounting.epsilon,
        "delta": body.accounting.delta,
    }
    assert disclose(run, tmp_path / "two") == found  # no clock, no chance


def test_every_statement_names_signed_fields_that_exist(run, tmp_path):
    found = disclose(run, tmp_path)
    tree = bundle(run)
    known = {
        "privacy_report": json.loads((tree / "privacy_report.json").read_text()),
        "privacy_plan": json.loads((tree / "privacy_plan.json").read_text()),
        "audit_report": json.loads((tree / "audit_report.json").read_text()),
        "utility_report": json.loads((tree / "utility_report.json").read_text()),
        "verdict": json.loads((tree / "verdict.json").read_text()),
        "config": json.loads((tree / "config.json").read_text()),
        "ledger": {},
    }
    assert len(found["nist_sp_800_226"]) == 13
    for item in found["nist_sp_800_226"]:
        assert item["statement"].strip(), item["topic"]
        for source in item["sources"]:
            node = known
            for part in source.split("."):
                assert part in node, source
                node = node[part]


def test_registry_entry_has_the_fields_of_the_template(run, tmp_path):
    found = disclose(run, tmp_path)
    entry = yaml.safe_load((tmp_path / "deployment.yaml").read_text())
    wanted = [f"deployment.{part}.{name}" for part, names in TEMPLATE.items() for name in names]
    assert list(paths(entry)) == ["url_slug", *wanted]
    assert entry == found["deployment_registry"]
    left = {path for path in found["to_be_completed"]}
    assert "deployment.basic.intended_use" in left
    assert (tmp_path / "deployment.yaml").read_text().count(PUBLISHER) == len(left)
    assert entry["deployment"]["deployment_model"]["release_type"] == "Many releases"


def test_text_of_others_is_shown_as_text(run, tmp_path):
    disclose(run, tmp_path)
    page = (tmp_path / "disclosure.md").read_text()
    assert "<script>" not in page
    assert "[free](" not in page
    assert "alert(1)" in page


def test_waiver_is_part_of_the_disclosure(tmp_path, monkeypatch):
    run = honest_run.start(tmp_path / "run").until_gate()
    start = json.loads(run.utility.read_text())["public_backbone"]
    chance = {"value": 0.2, "low": 0.0, "high": 0.4}
    gained = {**start, "difference": dict.fromkeys(start["difference"], chance)}
    run.rewrite(run.utility, public_backbone=gained)
    run.do_account()
    monkeypatch.setenv("FEDEMB_ACTOR", "ada")
    model_sha = json.loads((run.model / "model.json").read_text())["weights_sha"]
    run.ledger().waive(
        code="no_gain_over_public",
        reason="the board agrees",
        model_sha=model_sha,
        signer=Signer.load_or_create(run.keys, "policy"),
    )
    run.do_account()
    run.do_gate()
    run.do_release()
    disclose(run, tmp_path / "out")
    words = "Released with a waiver by ada: the board agrees"
    assert words in (tmp_path / "out" / "disclosure.md").read_text()


@pytest.mark.parametrize("name", ["config.json", "privacy_report.json", "utility_report.json"])
def test_bundle_that_changed_since_its_release_is_not_disclosed(run, tmp_path, name):
    shutil.copytree(bundle(run), tmp_path / "bundle")
    path = tmp_path / "bundle" / name
    path.write_bytes(path.read_bytes().replace(b"2.0", b"9.0", 1).replace(b"0.5", b"0.9", 1))
    with pytest.raises(FedEmbError):
        disclose(run, tmp_path / "out", tmp_path / "bundle")
    assert not (tmp_path / "out").exists()


def test_release_that_does_not_exist_is_answered(run, tmp_path):
    with pytest.raises(InputError):
        disclose(run, tmp_path / "out", tmp_path / "none")
