"""What the gate denies for certain is refused before a run is charged."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.documents.plan import read_plan
from fedemb.errors import ArtifactError, BudgetExceeded, Refused, UnsupportedAccounting
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import write_bytes
from fedemb.privacy import accounting, prices
from fedemb.privacy.group_mechanisms import GroupPoissonGaussian
from fedemb.release import privacy_rules, rule
from fedemb.release.decide import RULES, check_before_charge
from fedemb.steps import reserve_budget
from fedemb.steps.reserve_budget import open_or_create
from tests.kit.pipeline_runs import honest_run
from tests.kit.signed_backbone import keras_file, no_rehearsal, sign_start, small_weights


def _context(root, **changes):
    (root / "images").mkdir(exist_ok=True)
    (root / "images" / "one").write_bytes(b"1")
    changes = {"data.source.uri": str(root / "images"), **changes}
    run = honest_run.start(root, policy_root=root, **changes)
    run.do_plan()
    return run.context()


def _charged(root):
    return [path.name for path in sorted((root / "ledger" / "weekly").glob("0*.json"))][1:]


NO_NUMBERS, NO_FILE = "NaN or infinite weights", r"not a readable \.keras file"
UNUSABLE = {
    "nan": (small_weights(np.nan), NO_NUMBERS),
    "infinite": (small_weights(np.inf), NO_NUMBERS),
    "minus infinite": (small_weights(-np.inf), NO_NUMBERS),
    "text": (b"weights", NO_FILE),
    "empty": (b"", NO_FILE),
    "foreign": (keras_file({"layers/seed_generator/vars/0": np.zeros(2)}), "seed_generator"),
}


@pytest.mark.parametrize("backbone", UNUSABLE)
def test_unusable_backbone_is_refused_before_the_charge(tmp_path, backbone):
    """The gate would deny every model from it after the budget is spent."""
    data, words = UNUSABLE[backbone]
    context = _context(tmp_path)
    write_bytes(tmp_path / "pretrained" / "backbone.keras", data)
    sign_start(context)
    with pytest.raises(ArtifactError, match=f"{words}.*Nothing was charged"):
        reserve_budget.run(context, rehearse=no_rehearsal)
    assert _charged(tmp_path) == []


def test_simulation_accepts_any_initial_weights(tmp_path):
    context = _context(tmp_path, purpose="simulation")
    write_bytes(tmp_path / "pretrained" / "backbone.keras", small_weights(np.nan))
    sign_start(context)
    reserve_budget.run(context, rehearse=no_rehearsal)
    assert _charged(tmp_path) == ["00000001.json"]


def test_a_version_that_another_run_released_is_a_warning(tmp_path, caplog):
    """A run may be resumed with another release.version."""
    first = honest_run.start(tmp_path / "first").until_release()
    second = honest_run.start(tmp_path / "second", "tuesday", first.policy_root)
    second.do("plan reserve")
    assert "glyphs 1.0 is released already; set another release.version" in caplog.text


def _priced(epsilon):
    def change(monkeypatch):
        found = SimpleNamespace(epsilon=epsilon, accountant="rdp")
        monkeypatch.setattr(rule, "guarantee_of", lambda *_: found)

    return change


def _accountants_disagree(monkeypatch):
    monkeypatch.setattr(privacy_rules, "epsilon_rdp", lambda *_: 1e-3)


def _old_library(monkeypatch):
    def refuse():
        raise UnsupportedAccounting("too old")

    prices.guarantee_of.cache_clear()
    monkeypatch.setattr(accounting, "library_version", refuse)


def _without_proof(monkeypatch):
    monkeypatch.setattr(GroupPoissonGaussian, "proof", "")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param(_priced(50.0), BudgetExceeded, "above the cap", id="cap"),
        pytest.param(_priced(np.inf), Refused, "epsilon is inf", id="infinite"),
        pytest.param(_priced(np.nan), Refused, "epsilon is nan", id="nan"),
        pytest.param(_accountants_disagree, Refused, "by RDP", id="accountants"),
        pytest.param(_old_library, UnsupportedAccounting, "too old", id="library"),
        pytest.param(_without_proof, Refused, "no proven guarantee", id="proof"),
    ],
)
def test_plan_the_gate_would_deny_is_not_charged(tmp_path, monkeypatch, change, error, words):
    context = _context(tmp_path)
    sign_start(context)
    change(monkeypatch)
    with pytest.raises(error, match=words):
        reserve_budget.run(context, rehearse=no_rehearsal)
    assert _charged(tmp_path) == []


def test_delta_that_the_gate_denies_is_not_charged(tmp_path):
    """A configuration cannot hold it, so it is put in after validation."""
    context = _context(tmp_path)
    sign_start(context)
    plan, _ = read_plan(context.artifacts.privacy_plan, context.config)
    ledger = open_or_create(context.ledger_uri, context.keys, context.config, plan)
    path = context.artifacts.pretrained / "backbone.keras"
    given = {"run_id": "monday", "start": (path, file_digest(path))}
    check_before_charge(context.config, plan, ledger, **given)
    for delta in (1 / 20_000, 0.0, np.nan):
        policy = context.config.policy.model_copy(update={"delta": delta})
        config = context.config.model_copy(update={"policy": policy})
        with pytest.raises(Refused, match="is not below 1/20000"):
            check_before_charge(config, plan, ledger, **given)


@pytest.mark.long
def test_waivable_reasons_are_warnings(tmp_path, caplog):
    context = _context(
        tmp_path,
        **{
            "pretraining": {"kind": "import", "import_path": "public.keras"},
            "policy.delta": 4e-5,
            "release.no_worse_than": "previous_release",
        },
    )
    sign_start(context)
    reserve_budget.run(context, rehearse=no_rehearsal)
    warned = {rule.code for rule in RULES if rule.before and rule.waivable}
    assert all(code in caplog.text for code in {*warned, "worse_than_previous_release"})
