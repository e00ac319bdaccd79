"""The commands: init, show, verify, void."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedemb.errors import FedEmbError, InputError, LedgerError, Refused
from fedemb.pipelines.cli import ledger_summary
from fedemb.pipelines.cli.main import app
from tests.kit import ledger_kit
from tests.kit.cli import fedemb
from tests.kit.pipeline_runs import honest_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return honest_run.start(tmp_path_factory.mktemp("cli") / "run").until_gate()


@pytest.mark.parametrize(("limit", "code"), [("1.7", 0), ("1.8", 3)])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_show_has_exit_code_3_below_the_limit_only(run, limit, code, form):
    words = ("show", "--ledger", run.ledger_uri, "--min-remaining", limit, *form)
    found = CliRunner().invoke(app, ["ledger", *words])
    assert getattr(found.exception, "exit_code", found.exit_code) == code
    assert "1.725" in found.output


def test_budget_forecast_is_the_first_refused_run():
    times = [datetime(2027, 1, day, tzinfo=UTC) for day in (4, 11, 18)]
    attempts = {
        number: SimpleNamespace(
            charged=number != 3,  # a simulation, which has no place in the series
            reserve=SimpleNamespace(time=(time + timedelta(hours=number == 3)).isoformat()),
            reserved=SimpleNamespace(blocks=["all/0"]),
        )
        for number, time in enumerate([*times, times[-1]])
    }
    ledger = SimpleNamespace(state=SimpleNamespace(attempts=attempts))
    due = ledger_summary.first_run_without_budget(ledger, ["all/0"], 2)
    assert due == datetime(2027, 2, 8, tzinfo=UTC)
    assert ledger_summary.first_run_without_budget(ledger, ["all/1"], 2) is None


def test_show_refuses_the_configuration_of_another_policy(run):
    with pytest.raises(InputError, match=r"no policy 'dp_sgd_quickstart', only .*Pass --policy"):
        fedemb("ledger", "show", "--ledger", run.ledger_uri, "--config", "dp_sgd_quickstart")


def test_number_of_fitting_runs_equals_reservations(run, tmp_path):
    ledger = run.ledger()
    content = ledger_summary.content_of(run.config)
    predicted = ledger_summary.fitting(ledger, content)
    digests = {name: "0" * 64 for name in ("plan_sha", "config_sha", "code_sha")}
    import shutil

    shutil.copytree(run.policy_root, tmp_path / "policy")
    other = honest_run.start(tmp_path / "other", "x", tmp_path / "policy").ledger()
    reserved = 0
    with pytest.raises(FedEmbError):  # noqa: PT012
        for number in range(10_000):
            other.reserve(run_id=f"more-{number}", content={**content, **digests, "input": "i"})
            reserved = number + 1
    assert predicted == reserved > 3
    blocks, refusal = ledger_summary.would_admit(other, run.config, content)
    assert not blocks
    assert "above the cap" in refusal
    assert ledger_summary.would_admit(ledger, run.config, content) == (["all/0"], None)
    moved = run.config.updated({"data.source.columns.user_id": "account"})
    assert "for life" in ledger_summary.would_admit(ledger, moved, content)[1]


def test_verify_prints_the_head_and_checks_anchors(run):
    head = run.ledger().head
    text = fedemb("ledger", "verify", "--ledger", run.ledger_uri)
    assert text.startswith("verified: 4 records")
    assert head.sha in text
    fedemb("ledger", "verify", "--ledger", run.ledger_uri, "--anchor", f"3:{head.sha}")
    with pytest.raises(LedgerError, match="rewritten"):
        fedemb("ledger", "verify", "--ledger", run.ledger_uri, "--anchor", f"3:{'0' * 64}")


def test_rotate_keys_and_ledger_show_print_the_rotation_and_its_reason(tmp_path):
    kit = ledger_kit.make(tmp_path)
    stores = ("--ledger", kit.ledger_uri, "--keys", kit.keys_uri)
    with pytest.raises(InputError, match="--reason is empty"):
        fedemb("ledger", "rotate-keys", *stores, "--reason", " ")
    assert kit.reader().head.sequence == 0
    text = fedemb(
        "ledger", "rotate-keys", *stores, "--reason", "a laptop was lost", "--role", "report"
    )
    assert "policy weekly: record 1 names new signing keys of report" in text
    assert "exit code 4" in text
    shown = fedemb("ledger", "show", "--ledger", kit.ledger_uri)
    assert "new signing keys of report: a laptop was lost" in shown
    assert fedemb("ledger", "verify", "--ledger", kit.ledger_uri).startswith("verified: 2 records")


REASON = ("--reason", "the node pool was gone")


def void(kit):
    where = ("--ledger", kit.ledger_uri, "--keys", kit.keys_uri)
    return fedemb("ledger", "void", "monday", *REASON, *where)


def test_void_refunds_an_unbound_reservation(tmp_path):
    kit = ledger_kit.make(tmp_path)
    ledger = kit.open()
    ledger.reserve(run_id="monday", content=ledger_kit.content())
    assert ledger.spent("all/0").epsilon > 0
    for _ in range(2):  # again changes nothing
        assert "charges nothing" in void(kit)
    ledger.refresh()
    assert ledger.spent("all/0").epsilon == 0
    assert len(ledger.chain.records) == 3
    ledger.verify()


def test_void_with_another_key_store_is_refused(tmp_path):
    kit = ledger_kit.make(tmp_path)
    kit.open().reserve(run_id="monday", content=ledger_kit.content())
    kit.keys_uri = str(tmp_path / "other")
    with pytest.raises(LedgerError, match="name the key store the ledger was made with"):
        void(kit)
    assert not (tmp_path / "other").exists()
    _ = kit.owner, kit.keys.load_or_create("signing/ledger")
    with pytest.raises(Refused, match="not the one this ledger trusts"):
        void(kit)
