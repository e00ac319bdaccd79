"""One mechanism is one class; no other module names it."""

import json
import re
from pathlib import Path
from typing import Literal

import pytest
from dp_accounting import dp_event as dpe
from typer.testing import CliRunner

from fedemb.config import RunConfig
from fedemb.errors import ArtifactError, GateDenied, Refused
from fedemb.pipelines.cli.main import app
from fedemb.privacy.accounting import price
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.registry import MECHANISMS, plan_from_json
from fedemb.privacy.sampling import sample
from fedemb.privacy.section import MechanismConfig
from fedemb.reports.privacy_words import TEXTS, MechanismText, participants
from fedemb.steps import gate_release
from tests.conftest import REPOSITORY
from tests.kit.pipeline_runs import honest_run, training_run
from tests.kit.privacy_worlds import ROOT, World, make_plan


class EveryoneConfig(MechanismConfig):
    """Every virtual client in every round."""

    kind: Literal["everyone"] = "everyone"


class Everyone(EveryoneConfig, MechanismPlan):
    """No sampling, fresh noise: a user moves one virtual client by 2C in every round."""

    section = EveryoneConfig
    proof = "a user moves one update by at most 2C, in every round"

    @property
    def normalizer(self):
        return float(self.virtual_clients)

    @property
    def chance(self):
        return 1.0

    @property
    def round_event(self):
        return dpe.GaussianDpEvent(self.noise_multiplier / 2)


TOY = {"kind": "everyone", "rounds": 3, "noise_multiplier": 60.0}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """The entries of a new module: in the registry, and in the table of report text."""
    monkeypatch.setitem(MECHANISMS, "everyone", Everyone)
    text = MechanismText(sampler="every virtual client in every round")
    monkeypatch.setitem(TEXTS, "everyone", text)


def test_every_mechanism_has_report_text():
    assert TEXTS.keys() == MECHANISMS.keys()
    kinds = (kind for kind in MECHANISMS if kind != "everyone")
    assert all(participants(make_plan(kind)) for kind in kinds)


def test_a_new_mechanism_is_planned_by_the_command_line():
    words = ["--config", "quickstart", "--set", f"mechanism={json.dumps(TOY)}", "--json"]
    words += ["--set", "partition.virtual_clients=625"]
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    fields = {"rounds": 3, "noise_multiplier": 60.0, "groupings": 1, "images_per_user": 4}
    ours = Everyone(virtual_clients=625, **fields)
    assert found["epsilon"] == price(ours.event(), ours.relation, found["delta"]).epsilon
    assert found["plan_sha"] == ours.digest
    described = CliRunner().invoke(app, ["config", "mechanism"]).output
    assert "mechanism[everyone].noise_multiplier" in described


def test_a_new_mechanism_goes_from_the_ledger_to_the_gate(tmp_path):
    run = honest_run.start(tmp_path / "run", mechanism=TOY).until_gate()
    assert run.ledger().state.attempts  # reserved and charged
    report = json.loads(run.report.read_text())
    assert report["mechanism"]["name"] == "everyone"
    assert "every virtual client in every round" in run.page.read_text()
    verdict = gate_release.run(run.context())
    assert verdict["allow"], verdict["reasons"]


def test_a_mechanism_without_a_proof_is_not_charged_and_the_gate_denies_it(tmp_path, monkeypatch):
    run = honest_run.start(tmp_path / "run", mechanism=TOY).until_gate()
    monkeypatch.setattr(Everyone, "proof", "")
    with pytest.raises(GateDenied, match="no proven guarantee"):
        gate_release.run(run.context())
    with pytest.raises(Refused, match=r"no proven guarantee.*Nothing was charged"):
        honest_run.start(tmp_path / "another", mechanism=TOY).until_gate()


@pytest.mark.long
def test_a_new_mechanism_trains(tmp_path):
    ready = training_run.prepare(tmp_path, training_run.config(mechanism=TOY))
    model = ready.train()
    assert model["rounds_run"] == 3
    lines = [json.loads(x) for x in (tmp_path / "model" / "rounds.jsonl").read_text().splitlines()]
    assert [line["clients_planned"] for line in lines] == [12.0] * 3
    assert lines[0]["event"] == {"type": "gaussian", "noise_multiplier": 30.0}
    clients = Everyone(rounds=3, noise_multiplier=60.0, virtual_clients=12, groupings=1)
    assert len(sample(clients, ROOT, 0, World(range(100), 12))) == 12


def test_a_kind_that_is_not_registered_is_refused(monkeypatch):
    plan = Everyone(rounds=3, noise_multiplier=60.0, virtual_clients=12, groupings=1).to_json()
    assert plan_from_json(plan).kind == "everyone"
    monkeypatch.delitem(MECHANISMS, "everyone")
    with pytest.raises(ArtifactError, match="'everyone', known are"):
        plan_from_json(plan)
    with pytest.raises(ValueError, match="mechanism"):
        RunConfig.model_validate({**training_run.config().model_dump(), "mechanism": TOY})


@pytest.mark.parametrize("kind", [kind for kind in MECHANISMS if kind != "everyone"])
def test_a_mechanism_is_named_in_four_product_files_at_most(kind):
    """Its module, the registry, the table of public names, and the table of report text."""
    word = re.compile(rf"[\"'.`]{kind}\b(?!\()")
    files = [
        path
        for folder in ("components", "pipelines")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if word.search(path.read_text())
    ]
    assert len(files) <= 4, [str(Path(path).relative_to(REPOSITORY)) for path in files]
