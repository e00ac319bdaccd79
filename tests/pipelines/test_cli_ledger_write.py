"""Void and waive: only what may be given back or waived, only with keys the ledger trusts."""

import json

import pytest

from fedemb.documents.model import ModelCard
from fedemb.errors import ArtifactError, InputError, LedgerError, Refused
from fedemb.foundation.document import read
from fedemb.gate.decide import WAIVABLE
from fedemb.keys import open_key_store
from fedemb.keys.signatures import Signer, write_signed
from fedemb.pipelines.cli import main as cli
from fedemb.pipelines.run.directory import RunDirectory
from tests.kit import ledger_kit
from tests.kit.pipeline_runs import honest_run

REASON = ("--reason", "the node pool was gone")


@pytest.fixture
def kit(tmp_path):
    kit = ledger_kit.Kit(str(tmp_path / "ledger"), str(tmp_path / "keys"))
    kit.open().create_policy(ledger_kit.terms(), kit.owner)
    return kit


def call(kit, *words):
    where = ("--ledger", kit.ledger_uri, "--keys", kit.keys_uri)
    cli.app(["ledger", *words, *where], standalone_mode=False)


def test_void_gives_an_unbound_reservation_back(kit, capsys):
    ledger = kit.open()
    ledger.reserve(run_id="monday", content=ledger_kit.content())
    assert ledger.spent("all/0").epsilon > 0
    call(kit, "void", "monday", *REASON)
    assert "charges nothing" in capsys.readouterr().out
    call(kit, "void", "monday", *REASON)  # again changes nothing
    ledger.refresh()
    assert ledger.spent("all/0").epsilon == 0
    assert len(ledger.chain.records) == 3
    ledger.verify()


def test_void_of_a_bound_run_is_refused(kit):
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=ledger_kit.content())
    ledger_kit.bind(ledger, reservation)
    before = ledger.spent("all/0").epsilon
    with pytest.raises(Refused, match="is bound"):
        call(kit, "void", "monday", *REASON)
    ledger.refresh()
    assert ledger.spent("all/0").epsilon == before > 0


def test_void_of_an_unknown_run_or_without_a_reason_is_bad_input(kit):
    with pytest.raises(InputError, match="has no run 'friday'"):
        call(kit, "void", "friday", *REASON)
    kit.open().reserve(run_id="monday", content=ledger_kit.content())
    with pytest.raises(InputError, match="--reason is empty"):
        call(kit, "void", "monday", "--reason", " ")


def test_other_keys_are_refused_and_none_are_made(kit, tmp_path):
    kit.open().reserve(run_id="monday", content=ledger_kit.content())
    kit.keys_uri = str(tmp_path / "other")
    with pytest.raises(LedgerError, match="name the key store the ledger was made with"):
        call(kit, "void", "monday", *REASON)
    assert not (tmp_path / "other").exists()
    _ = kit.owner, kit.keys.load_or_create("signing/ledger")
    with pytest.raises(Refused, match="not the one this ledger trusts"):
        call(kit, "void", "monday", *REASON)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that was committed."""
    return honest_run.start(tmp_path_factory.mktemp("trained") / "run").until_gate()


@pytest.fixture
def committed(trained, tmp_path):
    return honest_run.copy_of(trained, tmp_path / "run")


def folder_of(run, parent, named=None):
    """The run directory that `fedemb run` would have made."""
    directory = RunDirectory.create(parent, named or run.run_id, run.config)
    output = directory.public / "dp-fedemb-1" / "train-dp-fedemb" / "model"
    output.mkdir(parents=True)
    (output / "model.json").write_bytes((run.model / "model.json").read_bytes())
    return directory.root


def test_waive_signs_one_record_of_the_policy_owner_for_one_model(committed, tmp_path, capsys):
    card = json.loads((committed.model / "model.json").read_bytes())
    waive = ("waive", WAIVABLE[0], *REASON, "--model")
    call(committed, *waive, str(committed.model / "model.json"))
    assert f"of run {committed.run_id} as record" in capsys.readouterr().out
    call(committed, *waive, str(folder_of(committed, tmp_path / "runs")))
    assert "waived for this model already" in capsys.readouterr().out
    ledger = committed.ledger()
    (record,) = ledger.state.waivers
    assert record.body == {
        "code": WAIVABLE[0],
        "model_sha": card["weights_sha"],
        "reason": REASON[1],
    }
    ledger.verify()


def test_model_that_was_never_committed_is_not_waived(committed, tmp_path):
    """Every step may write the public folder that a run directory is read from."""
    head, waive = committed.ledger().head, ("waive", WAIVABLE[0], *REASON, "--model")
    planted, sound = tmp_path / "model.json", read(committed.model / "model.json", ModelCard).body
    planted.write_text(json.dumps({"weights_sha": 64 * "e"}))
    with pytest.raises(ArtifactError):
        call(committed, *waive, str(planted))
    other = sound.model_copy(update={"weights_sha": 64 * "e"})
    write_signed(planted, other, Signer.newest(committed.keys, "trainer"))
    with pytest.raises(Refused, match="has committed no such model"):
        call(committed, *waive, str(planted))
    with pytest.raises(Refused, match="stored in run 'friday'"):
        call(committed, *waive, str(folder_of(committed, tmp_path / "runs", "friday")))
    assert committed.ledger().head == head


def test_rules_of_arithmetic_or_integrity_cannot_be_waived(kit, tmp_path):
    with pytest.raises(Refused, match="cannot be waived"):
        call(kit, "waive", "epsilon_above_cap", "--model", str(tmp_path / "m.json"), *REASON)
    with pytest.raises(InputError, match="no rule 'foo'"):
        call(kit, "waive", "foo", "--model", str(tmp_path / "m.json"), *REASON)
    with pytest.raises(InputError, match="No run at"):
        call(kit, "waive", WAIVABLE[0], "--model", str(tmp_path), *REASON)
    with pytest.raises(ArtifactError, match=r"m\.json"):
        call(kit, "waive", WAIVABLE[0], "--model", str(tmp_path / "m.json"), *REASON)
    assert len(kit.open().chain.records) == 1


def test_init_with_keys_the_ledger_does_not_trust_is_refused(tmp_path):
    words = ["ledger", "init", "-c", "quickstart", "--ledger", str(tmp_path / "ledger"), "--keys"]
    cli.app([*words, str(tmp_path / "keys")], standalone_mode=False)
    with pytest.raises(LedgerError, match="the ledger was made with"):
        cli.app([*words, str(tmp_path / "other")], standalone_mode=False)
    assert not (tmp_path / "other").exists()
    open_key_store(str(tmp_path / "other")).create("signing/policy")
    with pytest.raises(Refused, match="not the one this ledger trusts"):
        cli.app([*words, str(tmp_path / "other")], standalone_mode=False)
