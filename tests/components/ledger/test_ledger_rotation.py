"""Signing keys are rotated: what was signed stays trusted, what retired keys sign does not."""

import shutil
from pathlib import Path

import pytest

from fedemb.documents.evidence import Evidence
from fedemb.errors import FedEmbError, GateDenied, LedgerError, Refused, SignatureInvalid
from fedemb.errors import StorageError as Retry
from fedemb.keys.trust import ROLES, Signer, TrustedKey
from fedemb.ledger import Ledger, begin_policy, ensure_trust, open_ledger, rotate_keys
from fedemb.storage import open_store
from tests.kit import ledger_kit as kit_
from tests.kit.pipeline_runs import honest_run
from tests.kit.verified import problems_of

REASON = "a year is over"


@pytest.fixture
def kit(tmp_path):
    kit = kit_.make(tmp_path)
    kit.open().reserve(run_id="monday", content=kit_.content())
    return kit


def rotate(kit, roles=ROLES):
    return rotate_keys(kit.ledger_uri, kit.keys, REASON, roles)


def forge(kit, signer, kind="void", **body):
    of_run = {} if kind in ("void", "decision") else {"run_id": "", "attempt": 0}
    body = body or {"reservation": 1, "reason": "gone"}
    kit_.forge(kit.ledger_uri, signer, kind, body, **of_run)


# ---- the ledger -------------------------------------------------------------------------------


def test_retired_key_adds_nothing_more(kit):
    stolen = Signer.load_or_create(kit.keys, "ledger")
    rotate(kit)
    forge(kit, stolen)
    with pytest.raises(SignatureInvalid, match=r"00000003.*record 2 had retired"):
        kit.reader()


def test_retired_key_counts_before_the_record_that_retires_it_and_not_at_it(kit):
    old, content = Signer.load_or_create(kit.keys, "report"), {"schema": "fedemb/any/1"}
    signature = old.sign(content)
    (record,) = rotate(kit)
    trust = kit.reader().chain.trust
    trust.verify(content, signature, "report", "it", at=record.sequence - 1)
    with pytest.raises(SignatureInvalid, match="had retired"):
        trust.verify(content, signature, "report", "it", at=record.sequence)


def test_retired_owner_rotates_and_waives_nothing_more(kit):
    stolen, ledger = kit.owner, kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, reservation)
    kit_.commit(kit, ledger, reservation, 20)
    rotate(kit, ["policy"])
    body = {"code": "delta_above_customary", "model_sha": kit_.sha("m"), "reason": "please"}
    body |= {"report_sha": None}
    with pytest.raises(Retry, match="rotated"):
        kit.open().decide(reservation, **body, signer=stolen)
    forge(kit, stolen, "decision", reservation=reservation.sequence, **body)
    with pytest.raises(SignatureInvalid, match="had retired"):
        kit.reader()


@pytest.mark.parametrize("who", ["a stranger", "the ledger's key"])
def test_only_the_policy_owner_names_keys(kit, who):
    new = vars(Signer("ledger", b"1" * 32, 2).trusted())
    if who == "a stranger":
        signer = Signer("policy", b"2" * 32)
        with pytest.raises(SignatureInvalid, match="not trusted in the role 'policy'"):
            kit.open().rotate([TrustedKey(**new)], REASON, signer)
        forge(kit, signer, "keys", keys=[new], reason=REASON)
        with pytest.raises(SignatureInvalid, match="does not hold"):
            kit.reader()
    else:
        signer = Signer.load_or_create(kit.keys, "ledger")
        with pytest.raises(LedgerError, match="role 'policy'"):
            kit.open().rotate([TrustedKey(**new)], REASON, signer)


@pytest.mark.parametrize(
    "keys",
    [
        [{"role": "ledger"}],
        [{"key_id": "0" * 32, "role": "ledger", "public_key": "00" * 32, "generation": 2}],
        [vars(Signer("ledger", b"1" * 32, 1).trusted())],
        [vars(Signer("ledger", bytes([n]) * 32, n).trusted()) for n in (2, 3)],
        [{**vars(Signer("ledger", b"1" * 32, 2).trusted()), "generation": True}],
        [{**vars(Signer("ledger", b"1" * 32, 2).trusted()), "role": "king"}],
    ],
    ids=["no key", "odd id", "old generation", "two of a role", "no number", "no role"],
)
def test_odd_keys_are_neither_written_nor_trusted(kit, keys):
    forge(kit, kit.owner, "keys", keys=keys, reason=REASON)
    with pytest.raises(FedEmbError, match="names new keys and cannot be trusted"):
        kit.reader()


# ---- steps that run meanwhile -----------------------------------------------------------------


@pytest.mark.parametrize("role", ["ledger", "trainer"])
def test_step_whose_key_was_rotated_meanwhile_writes_nothing_and_may_run_again(kit, role):
    ledger, trainer = kit.open(), kit.trainer
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, reservation)
    rotate(kit, [role])
    act = {"rounds_started": 2, "round_log_sha": kit_.sha("log"), "card_sha": kit_.sha("card")}
    with pytest.raises(Retry, match=r"rotated since this step.*run the step again"):
        ledger.commit(reservation, **act, signer=trainer, keys=kit.keys)
    again = kit.open()
    again.verify()
    assert again.state.attempts["monday", 1].status == "bound"
    trainer = Signer.current(kit.keys, "trainer", again.chain.trust)
    again.commit(reservation, **act, signer=trainer, keys=kit.keys)
    kit.reader().verify()


STEPS = ("plan", "reserve", "partition", "train", "measure", "account", "gate")


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(step, marks=[] if step in ("reserve", "gate") else pytest.mark.slow)
        for step in STEPS[1:]
    ],
)
def test_run_goes_on_over_a_rotation_between_any_two_steps(tmp_path, last):
    run = honest_run.start(tmp_path)
    run.do("plan reserve")
    pinned = tmp_path / "pinned.json"
    shutil.copy(Path(run.ledger_uri, "trust.json"), pinned)
    for step in STEPS[2:]:
        if STEPS[STEPS.index(step) - 1] == last:
            rotate_keys(run.ledger_uri, run.keys, REASON)
            if last == "measure":  # see the test below
                run.do_measure()
        getattr(run, f"do_{step}")()
    if last == "gate":
        rotate_keys(run.ledger_uri, run.keys, REASON)
    run.do_release()
    bundle = str(run.root / "releases" / "glyphs" / "1.0")
    with honest_run.stand_in_for_serving():
        assert problems_of(bundle, pinned) == []
        assert problems_of(bundle, pinned, run.ledger_uri) == []


def test_what_no_record_names_counts_under_no_key_retired_before_the_report(tmp_path, monkeypatch):
    """With the retired key of `evaluate` or `audit` somebody could have written them since."""
    run = honest_run.start(tmp_path)
    for step in STEPS[: STEPS.index("account")]:
        getattr(run, f"do_{step}")()
    rotate_keys(run.ledger_uri, run.keys, REASON)
    with pytest.raises(SignatureInvalid, match="had retired"):
        run.do_account()
    with monkeypatch.context() as without:
        without.setattr(Evidence, "unnamed", ())
        run.do_account()
    with pytest.raises(GateDenied, match=r"had retired.*had retired"):
        run.do_gate()
    run.do("measure account gate")


# ---- releases ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Monday's release, a rotation, Tuesday's release; and the keys pinned on Monday."""
    root = tmp_path_factory.mktemp("two")
    monday = honest_run.start(root / "a").until_release()
    pinned = root / "pinned.json"
    shutil.copy(Path(monday.ledger_uri, "trust.json"), pinned)
    rotate_keys(monday.ledger_uri, monday.keys, REASON)
    tuesday = honest_run.start(root / "b", "tuesday", monday.policy_root)
    tuesday.config = honest_run.config(**{"release.version": "2.0"})
    tuesday.until_release()
    bundles = [root / "a/releases/glyphs/1.0", root / "b/releases/glyphs/2.0"]
    return pinned, monday.ledger_uri, monday.keys, bundles


@pytest.mark.parametrize("which", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("live", [False, True], ids=["offline", "live"])
def test_releases_of_before_and_after_verify_with_the_keys_pinned_first(two, which, live):
    pinned, ledger_uri, _, bundles = two
    with honest_run.stand_in_for_serving():
        assert problems_of(str(bundles[which]), pinned, ledger_uri if live else None) == []


def test_release_signed_again_with_a_retired_key_is_denied(two, tmp_path):
    """A thief of Monday's keys changes Tuesday's card, and signs manifest and bundle again."""
    from fedemb.release import bundle as parts

    pinned, _, keys, bundles = two
    forged = tmp_path / "2.0"
    shutil.copytree(bundles[1], forged)
    (forged / "README.md").write_text("harmless")
    (forged / "manifest.json").unlink()
    thief = Signer.load_or_create(keys, "release")
    parts.write_manifest(forged, "glyphs", "2.0", thief)
    with honest_run.stand_in_for_serving():
        problems = problems_of(str(forged), pinned)
    (problem,) = problems  # no further check runs
    assert "bundle document" in problem
    assert "retired" in problem


# ---- several policies -------------------------------------------------------------------------


def test_all_policies_of_a_root_are_rotated_and_a_cut_short_rotation_is_made_good(kit, monkeypatch):
    for name in ("monthly", "yearly"):
        begin_policy(open_ledger(kit.ledger_uri, name, trust=kit.trust), kit_.terms(), kit.keys)
    honest = Ledger.rotate

    def killed(self, *words):
        if self.policy_id == "weekly":
            raise KeyboardInterrupt
        return honest(self, *words)

    monkeypatch.setattr(Ledger, "rotate", killed)
    with pytest.raises(KeyboardInterrupt):
        rotate(kit)
    monkeypatch.setattr(Ledger, "rotate", honest)
    kit.open().verify()  # continues with its old keys
    assert [record.policy_id for record in rotate(kit, ["report"])] == [
        "monthly",
        "weekly",
        "yearly",
    ]
    for name in ("monthly", "weekly", "yearly"):
        trusted = open_ledger(kit.ledger_uri, name, trust=kit.trust).chain.trust
        found = {role: trusted.current(role).generation for role in ROLES}
        assert found == {**dict.fromkeys(ROLES, 2), "report": 3}


def test_key_store_of_another_ledger_rotates_nothing(kit, tmp_path):
    from fedemb.keys import open_key_store

    with pytest.raises(LedgerError, match="not in the key store"):
        rotate_keys(kit.ledger_uri, open_key_store(str(tmp_path / "other")), REASON)
    assert kit.reader().head.sequence == 1


def test_new_policy_does_not_trust_retired_keys(kit, tmp_path):
    rotate(kit, ["report"])
    empty = open_ledger(kit.ledger_uri, "monthly", trust=kit.trust)
    with pytest.raises(Refused, match=r"report.*retired.*new ledger root"):
        begin_policy(empty, kit_.terms(), kit.keys)
    root = str(tmp_path / "another")
    trust = ensure_trust(open_store(root), kit.keys)
    assert trust.current("report").generation == 2
    begin_policy(open_ledger(root, "monthly", trust=trust), kit_.terms(), kit.keys)
    open_ledger(root, "monthly", trust=trust).verify()
