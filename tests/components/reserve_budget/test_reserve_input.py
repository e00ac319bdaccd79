"""What a reservation says about the input, which blocks may be charged, and by which code."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedemb.config import RunConfig
from fedemb.documents.model import Pretrained
from fedemb.errors import (
    ArtifactError,
    ConfigError,
    InputError,
    LedgerError,
    PlanMismatch,
    Refused,
    SignatureInvalid,
)
from fedemb.foundation.document import read
from fedemb.keys import LocalKeyStore
from fedemb.keys.trust import Signer, write_signed
from fedemb.ledger import read_reservation
from fedemb.runtime.step_context import StepContext
from fedemb.steps import plan_privacy, reserve_budget
from tests.kit.ledger_kit import connect
from tests.kit.pipeline_runs.partition_run import context_of, make_config, reserve_for
from tests.kit.signed_backbone import no_rehearsal, sign_start


def _config(root: Path, **changes: Any) -> RunConfig:
    source = root / "private.parquet"
    source.write_bytes(b"rows")
    return make_config(str(source), policy__epsilon_cap=100.0).updated(changes)


def test_input_commitments_of_two_runs_differ_for_equal_data(tmp_path):
    config = _config(tmp_path)
    first, again, other = (reserve_for(config, tmp_path, name) for name in ("a", "a", "b"))
    assert first["input"] == again["input"]
    assert first["input"] != other["input"]


@pytest.mark.parametrize(
    "changes",
    [
        {"partition.cohorts": ["again"]},
        {"partition.cohorts": ["all", "2026-01"], "data.source.columns.cohort": "month"},
    ],
)
def test_cohort_names_that_hide_spent_budget_are_refused_before_anything_is_charged(
    tmp_path, changes
):
    with pytest.raises(ConfigError, match="cohort column"):
        reserve_for(_config(tmp_path, **changes), tmp_path, "a")
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_missing_images_are_refused_before_the_charge(tmp_path, scheme):
    elsewhere = _config(tmp_path, **{"data.source.uri": f"{scheme}{tmp_path}/elsewhere"})
    assert "#" not in reserve_for(elsewhere, tmp_path, "sunday")["input"], "mounted by another step"
    shutil.rmtree(tmp_path / "ledger")
    shutil.rmtree(tmp_path / "keys")
    (tmp_path / "photos").mkdir()
    config = _config(tmp_path, **{"data.source.uri": f"{scheme}{tmp_path}/photos"})
    with pytest.raises(InputError, match="there is nothing at"):
        reserve_for(config, tmp_path, "monday")
    ledger = tmp_path / "ledger" / "default"
    assert [path.name for path in ledger.glob("*.json")] == ["00000000.json"]
    (tmp_path / "photos" / "a.jpg").write_bytes(b"")
    assert "#" in reserve_for(config, tmp_path, "monday")["input"]


def test_run_whose_name_has_a_root_key_of_another_policy_is_refused_uncharged(tmp_path):
    """Otherwise it would be charged, and could never fetch a root of its own."""
    reserve_for(_config(tmp_path), tmp_path, "monday")
    other = _config(tmp_path, **{"policy.policy_id": "monthly"})
    with pytest.raises(Refused, match="Choose another run id"):
        reserve_for(other, tmp_path, "monday")
    ledger = tmp_path / "ledger" / "monthly"
    assert [path.name for path in ledger.glob("*.json")] == ["00000000.json"]


@pytest.mark.parametrize("also", [(), ("reservation", "ledger")])
def test_run_without_the_policy_key_is_refused_before_the_charge(tmp_path, also):
    """With another key the same people would have other ids, blocks and evaluation sets."""
    config = _config(tmp_path)
    reserve_for(config, tmp_path, "monday")
    for name in ("policy", *also):
        shutil.rmtree(tmp_path / "keys" / name, ignore_errors=True)
    records = sorted((tmp_path / "ledger").rglob("*.json"))
    with pytest.raises(LedgerError, match="estore the key store"):
        reserve_for(config, tmp_path, "tuesday")
    assert sorted((tmp_path / "ledger").rglob("*.json")) == records
    assert not (tmp_path / "keys" / "policy").exists()


def test_started_training_gets_no_second_root_key(tmp_path):
    """Its rounds would draw other noise and coins from there on."""
    config = _config(tmp_path)
    reserve_for(config, tmp_path, "monday")
    context = context_of(config, tmp_path, "monday")
    ledger = connect(context.ledger_uri, context.keys_uri, config.policy.policy_id)
    reservation = read_reservation(context.artifacts.reservation)
    shas = {"inputs_sha": "1" * 64, "private_root": "2" * 64}
    ledger.bind(reservation, commitments={"users": "3" * 64, "evaluation": "4" * 64}, **shas)
    assert reserve_for(config, tmp_path, "monday")
    shutil.rmtree(tmp_path / "keys" / "reservation")
    with pytest.raises(LedgerError, match=r"started training, is missing in .*other noise"):
        reserve_for(config, tmp_path, "monday")
    assert not (tmp_path / "keys" / "reservation").exists()


def _changed_weights(context: StepContext) -> None:
    (context.artifacts.pretrained / "backbone.keras").write_bytes(b"other weights")


def _signed_by_another(context: StepContext) -> None:
    card = context.artifacts.pretrained / "pretrained.json"
    elsewhere = Signer.newest(LocalKeyStore(card.parent / "keys"), "pretrain")
    write_signed(card, read(card, Pretrained).body, elsewhere)


def _no_card(context: StepContext) -> None:
    (context.artifacts.pretrained / "pretrained.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_changed_weights, ArtifactError),
        (_signed_by_another, SignatureInvalid),
        (_no_card, ArtifactError),
    ],
)
def test_unusable_public_backbone_is_refused_before_the_charge(tmp_path, spoil, error):
    config = _config(tmp_path)
    context = context_of(config, tmp_path, "a")
    plan_privacy.run(context)
    sign_start(context)
    spoil(context)
    with pytest.raises(error):
        reserve_budget.run(context, rehearse=no_rehearsal)
    assert _records(tmp_path) == ["00000000.json"]  # the policy's terms; no charge


def test_backbone_of_another_configuration_is_refused_before_the_charge(tmp_path):
    config = _config(tmp_path)
    plan_privacy.run(context_of(config, tmp_path, "a"))
    sign_start(context_of(config.updated({"model.embedding_dim": 16}), tmp_path, "a"))
    with pytest.raises(PlanMismatch, match="public backbone"):
        reserve_budget.run(context_of(config, tmp_path, "a"), rehearse=no_rehearsal)
    assert _records(tmp_path) == ["00000000.json"]


def _records(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "ledger" / "default").glob("0*.json"))
