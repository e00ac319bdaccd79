"""Void: only what may be given back, only with keys the ledger trusts."""

import pytest

from fedemb.errors import InputError, LedgerError, Refused
from fedemb.pipelines.cli import main as cli
from tests.kit import ledger_kit

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
