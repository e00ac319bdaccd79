"""Keys: created once, kept private, destroyed for good; signatures bind content and role."""

import dataclasses
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.documents.evidence import Evidence
from fedemb.documents.verdict import ReleaseManifest
from fedemb.errors import (
    ArtifactError,
    ConfigError,
    FedEmbError,
    GateDenied,
    LedgerError,
    Refused,
    SignatureInvalid,
    StorageError,
)
from fedemb.errors import StorageError as Retry
from fedemb.foundation.document import read
from fedemb.keys import commit_to, commit_to_users, derive, open_key_store, partition_key
from fedemb.keys.secret_manager import SecretManagerKeyStore
from fedemb.keys.trust import ROLES, Signer, TrustedKey, TrustStore, sign_document, trust_of
from fedemb.ledger import Ledger, ensure_trust, init_policy, open_ledger, rotate_keys
from fedemb.storage import open_store
from tests.kit import ledger_kit as kit_
from tests.kit.ledger_kit import with_policy_key
from tests.kit.pipeline_runs import honest_run
from tests.kit.servers.fake_secret_manager import FakeSecretManager
from tests.kit.verified import problems_of


@pytest.fixture(params=["folder", "secret manager"])
def keys(request, tmp_path):
    if request.param == "folder":
        return open_key_store(str(tmp_path / "keys"))
    return SecretManagerKeyStore("project", client=FakeSecretManager())


def test_key_is_created_once_and_fetched_as_it_was(keys):
    key = keys.create("reservation/monday-1")
    assert len(key) == 32
    assert keys.fetch("reservation/monday-1") == key
    with pytest.raises(FileExistsError):
        keys.create("reservation/monday-1")
    assert keys.load_or_create("reservation/monday-1") == key


@pytest.mark.parametrize(("ledger", "keys"), [("l", "l/keys"), ("k/l", "k"), ("l", "l")])
def test_keys_inside_the_ledger_are_refused_before_one_is_made(tmp_path, ledger, keys):
    store = open_key_store(str(tmp_path / keys))
    with pytest.raises(ConfigError, match="lie one inside the other"):
        ensure_trust(open_store(str(tmp_path / ledger)), store)
    assert store.newest("signing/policy") == 0


def test_trust_file_that_another_process_creates_first_is_used(tmp_path, monkeypatch):
    first, others = kit_.make(tmp_path).trust, open_key_store(str(tmp_path / "other"))
    monkeypatch.setattr("fedemb.storage.local.LocalStore.exists", lambda *_: False)
    assert ensure_trust(open_store(str(tmp_path / "ledger")), others).digest == first.digest


def test_destroyed_key_is_gone_and_its_name_is_never_used_again(keys):
    keys.create("reservation/monday-1")
    keys.destroy("reservation/monday-1")
    keys.destroy("reservation/monday-1")
    assert not keys.exists("reservation/monday-1")
    with pytest.raises(LedgerError, match="destroyed"):
        keys.fetch("reservation/monday-1")
    with pytest.raises(FileExistsError):
        keys.create("reservation/monday-1")


def test_partly_destroyed_key_cannot_be_read(tmp_path, monkeypatch):
    keys = open_key_store(str(tmp_path / "keys"))
    keys.create("reservation/monday-1")
    path = tmp_path / "keys" / "reservation" / "monday-1"
    with monkeypatch.context() as killed:
        killed.setattr(type(path), "unlink", lambda *_, **__: None)
        keys.destroy("reservation/monday-1")
    assert path.exists()
    assert not keys.exists("reservation/monday-1")
    with pytest.raises(LedgerError, match="destroyed"):
        keys.fetch("reservation/monday-1")
    keys.destroy("reservation/monday-1")
    assert not path.exists()


def test_bytes_of_a_destroyed_key_are_overwritten(tmp_path):
    """Another name of the file, as a backup by links has it, holds the key no more."""
    keys, copy = open_key_store(str(tmp_path / "keys")), tmp_path / "copy"
    key = keys.create("reservation/monday-1")
    copy.hardlink_to(tmp_path / "keys" / "reservation" / "monday-1")
    assert copy.read_bytes() == key
    keys.destroy("reservation/monday-1")
    assert copy.read_bytes() != key


def test_old_and_new_signing_keys_coexist(keys):
    assert keys.newest("signing/report") == 0
    first = keys.load_or_create("signing/report")
    assert keys.newest("signing/report") == 1
    number = keys.renew("signing/report")
    second = keys.fetch(f"signing/report@{number}")
    assert keys.newest("signing/report") == number > 1
    assert keys.fetch("signing/report") == first != second
    assert keys.renew("signing/report") > number
    assert keys.newest("signing/gate") == 0


def test_lost_race_for_a_key_adds_no_generation(keys, monkeypatch):
    keys.create("signing/report")
    with monkeypatch.context() as raced:
        raced.setattr(type(keys), "used", lambda *_: False)  # another one creates it after the look
        with pytest.raises(FileExistsError):
            keys.create("signing/report")
    assert keys.newest("signing/report") == 1 == Signer.newest(keys, "report").generation
    number = keys.renew("signing/report")
    assert keys.newest("signing/report") == number == Signer.newest(keys, "report").generation


def test_leftover_of_a_killed_key_creation_is_deleted_with_the_key(tmp_path, monkeypatch):
    keys = open_key_store(str(tmp_path / "keys"))
    folder = tmp_path / "keys" / "reservation"
    with monkeypatch.context() as killed:
        killed.setattr("os.link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        killed.setattr(type(folder), "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            keys.create("reservation/monday-1", bytes(range(32)))
    assert [path.read_bytes() for path in folder.iterdir()] == [bytes(range(32))]
    keys.create("reservation/monday-1")
    keys.create("reservation/monday-10")
    keys.destroy("reservation/monday-1")
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["monday-1.destroyed", "monday-10"]


def test_destroyed_key_still_reserves_its_name(keys):
    assert not keys.used("ledger/weekly+1")
    keys.create("ledger/weekly+1")
    assert keys.used("ledger/weekly+1")
    keys.destroy("ledger/weekly+1")
    assert keys.used("ledger/weekly+1")
    assert not keys.exists("ledger/weekly+1")


def test_secret_without_a_version_is_completed():
    client = FakeSecretManager()
    store = SecretManagerKeyStore("project", client=client)
    client.create_secret("", store._secret_id("policy/p"), {})
    key = store.create("policy/p")
    assert store.fetch("policy/p") == key


def test_keys_are_private_to_their_owner(tmp_path):
    keys = open_key_store(str(tmp_path / "keys"))
    keys.create("policy/p")
    path = tmp_path / "keys" / "policy" / "p"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o640)
    with pytest.raises(StorageError, match="0640"):
        keys.fetch("policy/p")


@pytest.mark.parametrize("folder", ["", "policy", "signing/gate"])
def test_world_writable_key_folder_is_refused(tmp_path, folder, monkeypatch):
    """A person who may write there can replace a key by their own."""
    keys = open_key_store(str(tmp_path / "keys"))
    name = "signing/gate" if folder.startswith("signing") else "policy/p"
    key = keys.create(name)
    for mode in (0o777, 0o703):
        (tmp_path / "keys" / folder).chmod(mode)
        with pytest.raises(
            StorageError, match=f"mode {mode:04o}, so any user may replace its keys"
        ):
            keys.fetch(name)
    with pytest.raises(StorageError, match="any user may replace its keys"):
        keys.create(f"{name}-2" if folder != "signing/gate" else "signing/gate@2")
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "keys" / folder)
    assert keys.fetch(name) == key  # the mode of a volume is the cluster's
    monkeypatch.undo()
    (tmp_path / "keys" / folder).chmod(0o770)
    assert keys.fetch(name) == key


@pytest.mark.parametrize("size", [0, 31, 33])
def test_key_of_wrong_length_is_refused(tmp_path, size):
    keys = open_key_store(str(tmp_path / "keys"))
    keys.create("policy/p")
    (tmp_path / "keys" / "policy" / "p").write_bytes(bytes(size))
    with pytest.raises(LedgerError, match=f"has {size} bytes, expected 32"):
        keys.fetch("policy/p")


@pytest.mark.parametrize(
    "name", ["policy/../x", "other/x", "policy/", "policy/a/b", "x", "policy/a@2", "signing/a@0"]
)
def test_invalid_key_names_are_refused(keys, name):
    with pytest.raises(Refused):
        keys.create(name)


@pytest.mark.parametrize("uri", ["gs://bucket/keys", "s3://bucket/keys"])
def test_object_stores_are_refused_as_key_stores(uri):
    with pytest.raises(ConfigError, match="copies"):
        open_key_store(uri)


labels = st.lists(st.text(max_size=4), max_size=4)


@given(labels, labels)
def test_different_labels_give_different_keys(first, second):
    same = derive(b"k", *first) == derive(b"k", *second)
    assert same == (first == second)


def test_commitments_depend_on_their_key_and_a_lost_key_is_an_error(tmp_path):
    keys = with_policy_key(open_key_store(str(tmp_path)), "a", "b")
    assert partition_key(keys, "a") != partition_key(keys, "b")
    assert partition_key(keys, "a") == partition_key(keys, "a")
    assert commit_to(b"1" * 32, b"data") != commit_to(b"2" * 32, b"data")
    with pytest.raises(LedgerError, match="key policy/c is not in"):  # a lost one has no substitute
        partition_key(keys, "c")


def test_commitment_to_equal_users_differs_between_runs_and_attempts():
    """Otherwise two attempts would reveal whether a user deleted between them had trained."""
    key, digest = b"1" * 32, "a" * 64
    found = {commit_to_users(key, *of, digest) for of in (("r", 1), ("r", 2), ("r1", 1))}
    assert len(found) == 3
    assert commit_to_users(key, "r", 1, digest) in found


# ---- signatures -------------------------------------------------------------------------------


@pytest.fixture
def trust(tmp_path):
    return trust_of(open_key_store(str(tmp_path / "keys")))


@pytest.fixture
def signer(tmp_path, trust):
    return Signer.load_or_create(open_key_store(str(tmp_path / "keys")), "report")


def check(document, trust, role="report"):
    body = {name: value for name, value in document.items() if name != "signature"}
    trust.verify(body, document.get("signature"), role, "the document")


def test_signature_binds_content_and_role(signer, trust):
    signed = sign_document({"schema": "x/1", "epsilon": 1.5}, signer)
    check(signed, trust)
    found = signed["signature"]
    for changed in (
        {**signed, "epsilon": 1.4},
        {**signed, "more": 1},
        {**signed, "signature": {**found, "value": "0" * 128}},
        *({**signed, "signature": {**found, "algorithm": name}} for name in ("none", "ECDSA")),
        {**signed, "signature": None},
        {**signed, "signature": {**found, "value": found["value"].upper()}},
        {key: signed[key] for key in ("schema", "epsilon")},
    ):
        with pytest.raises(SignatureInvalid):
            check(changed, trust)
    with pytest.raises(SignatureInvalid, match="role 'ledger'"):
        check(signed, trust, "ledger")


def test_trust_store_round_trip(trust, tmp_path):
    trust.save(tmp_path / "trust.json")
    assert TrustStore.load(tmp_path / "trust.json").keys == trust.keys
    odd = dataclasses.replace(trust.keys[0], role="emperor")
    with pytest.raises(SignatureInvalid):
        TrustStore([odd])
    (tmp_path / "trust.json").write_text('{"schema": "fedemb/trust/1", "keys": [{}]}')
    with pytest.raises(ArtifactError):
        TrustStore.load(tmp_path / "trust.json")


# ---- Signing keys are rotated: what was signed stays trusted, what retired keys sign does not ----


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


def test_record_signed_by_a_retired_key_is_refused(kit):
    stolen = Signer.load_or_create(kit.keys, "ledger")
    rotate(kit)
    forge(kit, stolen)
    with pytest.raises(SignatureInvalid, match=r"00000003.*record 2 had retired"):
        kit.reader()


def test_retired_key_is_trusted_only_before_its_rotation_record(kit):
    old, content = Signer.load_or_create(kit.keys, "report"), {"schema": "fedemb/any/1"}
    signature = old.sign(content)
    (record,) = rotate(kit)
    trust = kit.reader().chain.trust
    trust.verify(content, signature, "report", "it", at=record.sequence - 1)
    with pytest.raises(SignatureInvalid, match="had retired"):
        trust.verify(content, signature, "report", "it", at=record.sequence)


def test_retired_policy_owner_key_cannot_sign_decisions(kit):
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
def test_only_the_policy_owner_may_rotate_keys(kit, who):
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
def test_malformed_key_rotation_record_is_refused(kit, keys):
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
def test_run_continues_after_a_key_rotation_between_steps(tmp_path, last):
    run = honest_run.start(tmp_path)
    run.do("plan reserve")
    pinned = tmp_path / "pinned.json"
    shutil.copy(run.trust, pinned)
    for step in STEPS[2:]:
        if STEPS[STEPS.index(step) - 1] == last:
            rotate_keys(run.ledger_uri, run.keys, REASON)
            if last == "measure":  # see the test below
                run.do_measure()
        getattr(run, f"do_{step}")()
    if last == "gate":
        rotate_keys(run.ledger_uri, run.keys, REASON)
    run.do_release()
    with honest_run.stand_in_for_serving():
        assert problems_of(str(run.bundle), pinned) == []
        assert problems_of(str(run.bundle), pinned, run.ledger_uri) == []


def test_unrecorded_documents_signed_by_retired_keys_are_rejected(tmp_path, monkeypatch):
    """With the retired key of `evaluate` or `audit` somebody could have written them since."""
    run = honest_run.start(tmp_path)
    for step in STEPS[: STEPS.index("account")]:
        getattr(run, f"do_{step}")()
    rotate_keys(run.ledger_uri, run.keys, REASON)
    with pytest.raises(SignatureInvalid, match="had retired"):
        run.do_account()
    with monkeypatch.context() as without:
        without.setattr(Evidence, "unrecorded", ())
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
    shutil.copy(monday.trust, pinned)
    rotate_keys(monday.ledger_uri, monday.keys, REASON)
    tuesday = honest_run.start(root / "b", "tuesday", monday.policy_root)
    tuesday.config = honest_run.config(**{"release.version": "2.0"})
    tuesday.until_release()
    bundles = [root / "a/releases/glyphs/1.0", root / "b/releases/glyphs/2.0"]
    return pinned, monday.ledger_uri, monday.keys, bundles


@pytest.mark.parametrize("which", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("live", [False, True], ids=["offline", "live"])
def test_releases_before_and_after_a_rotation_verify_with_pinned_trust(two, which, live):
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
    manifest = read(forged / "manifest.json", ReleaseManifest).body
    (forged / "manifest.json").unlink()
    thief = Signer.load_or_create(keys, "release")
    parts.write_manifest(forged, manifest.identity, thief)
    with honest_run.stand_in_for_serving():
        problems = problems_of(str(forged), pinned)
    (problem,) = problems  # no further check runs
    assert "release document" in problem
    assert "retired" in problem


# ---- several policies -------------------------------------------------------------------------


def test_rotation_covers_all_policies_and_can_be_repeated(kit, monkeypatch):
    for name in ("monthly", "yearly"):
        init_policy(open_ledger(kit.ledger_uri, name, trust=kit.trust), kit_.terms(), kit.keys)
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
    (record,) = rotate(kit, ["report"])
    keys = [TrustedKey(**key) for key in record.body["keys"]]
    assert kit.open().rotate(keys, REASON, kit.owner) == record
    empty = open_ledger(kit.ledger_uri, "monthly", trust=kit.trust)
    with pytest.raises(Refused, match=r"report.*retired.*new ledger root"):
        init_policy(empty, kit_.terms(), kit.keys)
    root = str(tmp_path / "another")
    trust = ensure_trust(open_store(root), kit.keys)
    assert trust.current("report").generation == 2
    init_policy(open_ledger(root, "monthly", trust=trust), kit_.terms(), kit.keys)
    open_ledger(root, "monthly", trust=trust).verify()
