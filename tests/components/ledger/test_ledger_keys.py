"""Keys: created once, kept private, destroyed for good; signatures bind content and role."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.errors import (
    ArtifactError,
    ConfigError,
    LedgerError,
    Refused,
    SignatureInvalid,
    StorageError,
)
from fedemb.keys import commit_to, commit_to_people, derive, open_key_store, partition_key
from fedemb.keys.secret_manager import SecretManagerKeyStore
from fedemb.keys.trust import Signer, TrustStore, sign_document, trust_of
from tests.kit.ledger_kit import with_policy_key
from tests.kit.servers.fake_secret_manager import FakeSecretManager


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


def test_destroyed_key_is_gone_and_its_name_is_never_used_again(keys):
    keys.create("reservation/monday-1")
    keys.destroy("reservation/monday-1")
    keys.destroy("reservation/monday-1")
    assert not keys.exists("reservation/monday-1")
    with pytest.raises(LedgerError, match="destroyed"):
        keys.fetch("reservation/monday-1")
    with pytest.raises(FileExistsError):
        keys.create("reservation/monday-1")


def test_key_whose_destroyer_was_killed_half_way_is_no_key(tmp_path, monkeypatch):
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


def test_generations_of_a_signing_key_stand_side_by_side(keys):
    assert keys.newest("signing/report") == 0
    first = keys.load_or_create("signing/report")
    assert keys.newest("signing/report") == 1
    number = keys.renew("signing/report")
    second = keys.fetch(f"signing/report@{number}")
    assert keys.newest("signing/report") == number > 1
    assert keys.fetch("signing/report") == first != second
    assert keys.renew("signing/report") > number
    assert keys.newest("signing/gate") == 0


def test_lost_race_for_a_key_is_no_generation(keys, monkeypatch):
    keys.create("signing/report")
    with monkeypatch.context() as raced:
        raced.setattr(type(keys), "used", lambda *_: False)  # another one creates it after the look
        with pytest.raises(FileExistsError):
            keys.create("signing/report")
    assert keys.newest("signing/report") == 1
    number = keys.renew("signing/report")
    assert keys.newest("signing/report") == number


def test_what_a_killed_creation_left_goes_with_its_key(tmp_path, monkeypatch):
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


def test_name_was_used_even_if_its_key_is_destroyed(keys):
    assert not keys.used("ledger/weekly+1")
    keys.create("ledger/weekly+1")
    assert keys.used("ledger/weekly+1")
    keys.destroy("ledger/weekly+1")
    assert keys.used("ledger/weekly+1")
    assert not keys.exists("ledger/weekly+1")


def test_secret_left_without_a_version_by_a_kill_is_completed():
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
def test_key_folder_that_everybody_may_write_is_refused(tmp_path, folder, monkeypatch):
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
def test_key_of_another_length_is_no_key(tmp_path, size):
    keys = open_key_store(str(tmp_path / "keys"))
    keys.create("policy/p")
    (tmp_path / "keys" / "policy" / "p").write_bytes(bytes(size))
    with pytest.raises(LedgerError, match=f"has {size} bytes, expected 32"):
        keys.fetch("policy/p")


@pytest.mark.parametrize(
    "name",
    ["policy/../x", "other/x", "policy/", "policy/a/b", "x", "policy/a@2", "signing/a@0"],
)
def test_names_that_could_lead_elsewhere_are_refused(keys, name):
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


def test_commitment_needs_the_key(tmp_path):
    keys = with_policy_key(open_key_store(str(tmp_path)), "a", "b")
    assert partition_key(keys, "a") != partition_key(keys, "b")
    assert partition_key(keys, "a") == partition_key(keys, "a")
    assert commit_to(b"1" * 32, b"data") != commit_to(b"2" * 32, b"data")
    with pytest.raises(LedgerError, match="key policy/c is not in"):  # a lost one has no substitute
        partition_key(keys, "c")


def test_equal_users_of_two_attempts_or_runs_have_commitments_of_their_own():
    """Otherwise two attempts would reveal whether a user deleted between them had trained."""
    key, digest = b"1" * 32, "a" * 64
    found = {commit_to_people(key, *of, digest) for of in (("r", 1), ("r", 2), ("r1", 1))}
    assert len(found) == 3
    assert commit_to_people(key, "r", 1, digest) in found


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
        {**signed, "signature": {**found, "algorithm": "none"}},
        {**signed, "signature": None},
        {**signed, "signature": {**found, "value": found["value"].upper()}},
        {key: signed[key] for key in ("schema", "epsilon")},
    ):
        with pytest.raises(SignatureInvalid):
            check(changed, trust)
    with pytest.raises(SignatureInvalid, match="role 'ledger'"):
        check(signed, trust, "ledger")


def test_trust_store_keeps_what_it_was_given(trust, tmp_path):
    trust.save(tmp_path / "trust.json")
    assert TrustStore.load(tmp_path / "trust.json").keys == trust.keys
    odd = dataclasses.replace(trust.keys[0], role="emperor")
    with pytest.raises(SignatureInvalid):
        TrustStore([odd])
    (tmp_path / "trust.json").write_text('{"schema": "fedemb/trust/1", "keys": [{}]}')
    with pytest.raises(ArtifactError):
        TrustStore.load(tmp_path / "trust.json")
