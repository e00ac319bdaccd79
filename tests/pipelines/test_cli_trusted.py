"""Commands load a release only if it is unchanged."""

import json
import shutil

import pytest

from fedemb.errors import ArtifactError, FedEmbError, InputError, Refused, SignatureInvalid
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.document import encode
from fedemb.keys import open_key_store
from fedemb.keys.trust import Signer, sign_document, trust_of
from fedemb.pipelines.cli.main import app
from fedemb.release import registries
from fedemb.release import released as module

COMMANDS = {
    "embed": ("embed", "photos", "-m", "BUNDLE"),
    "register": ("register", "BUNDLE", "--to", "mlflow+https://registry.example"),
}


class Loaded(Exception):
    """A file of the bundle was read."""


@pytest.fixture(autouse=True)
def fail_on_load(monkeypatch, tmp_path):
    """Reports when the model is about to be loaded or registered."""

    def load(*_):
        raise Loaded

    monkeypatch.setattr(module.ReleasedModel, "__init__", load)
    monkeypatch.setattr(registries.Release, "of", load)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEMB_POLICY", raising=False)


@pytest.fixture
def bundle(tmp_path, small_release):
    shutil.copytree(small_release, tmp_path, dirs_exist_ok=True)
    return tmp_path / "bundle"


def _run(command, bundle, *more):
    words = [str(bundle) if word == "BUNDLE" else word for word in COMMANDS[command]]
    app(args=[*words, *more], standalone_mode=False)


def _trust(path="ledger/trust.json"):
    return ("--trust", str(path))


def _byte(name):
    def change(bundle):
        data = bytearray((bundle / name).read_bytes())
        data[len(data) // 2] ^= 1
        (bundle / name).write_bytes(data)

    return change


def _extra(bundle):
    (bundle / "saved_model" / "assets.extra").write_bytes(b"")


def _link(bundle):
    (bundle / "backbone.keras").rename(bundle.parent / "backbone.keras")
    (bundle / "backbone.keras").symlink_to(bundle.parent / "backbone.keras")


def _manifest_again(sign):
    """Other weights, and a manifest that says so."""

    def change(bundle):
        _byte("backbone.keras")(bundle)
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        manifest["files"]["backbone.keras"] = file_digest(bundle / "backbone.keras")
        (bundle / "manifest.json").write_bytes(encode(sign(manifest, bundle)))

    return change


def _as_it_was(manifest, _):
    return manifest


def _by_a_stranger(manifest, bundle):
    stranger = open_key_store(str(bundle.parent / "stranger"))
    return sign_document(manifest, Signer.newest(stranger, "release"))


HARMS = {
    "manifest again, old signature": _manifest_again(_as_it_was),
    "manifest again, other key": _manifest_again(_by_a_stranger),
    "weights": _byte("backbone.keras"),
    "how photos are read": _byte("preprocessing.py"),
    "file more": _extra,
    "link": _link,
}


@pytest.mark.parametrize("harm", HARMS)
def test_bundle_that_was_changed_is_not_loaded(bundle, harm):
    HARMS[harm](bundle)
    with pytest.raises((SignatureInvalid, ArtifactError)):
        _run("embed", bundle, *_trust())


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_bundle_is_not_loaded(bundle, command, tmp_path):
    trust_of(open_key_store(str(tmp_path / "keys"))).save(tmp_path / "trust.json")
    with pytest.raises(SignatureInvalid, match="the ledger in the bundle is not valid"):
        _run(command, bundle, *_trust(tmp_path / "trust.json"))


def test_wrong_trust_file_error_states_cause_and_remedy(bundle, tmp_path):
    trust_of(open_key_store(str(tmp_path / "keys"))).save(tmp_path / "trust.json")
    words = ["verify", str(bundle), "--skip-saved-model", *_trust(tmp_path / "trust.json")]
    with pytest.raises(Refused) as caught:
        app(args=words, standalone_mode=False)
    assert str(caught.value) == (
        "Verification failed: the ledger in the bundle is not valid: no key of the trust file "
        "signed its first record. Pass the trust.json of the owner of this release. If this was "
        "the right file, fetch the bundle again. Do not use the file."
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_bundle_is_loaded_under_the_keys_of_its_owner(bundle, command, monkeypatch):
    """Control for the tests above."""
    with pytest.raises(Loaded):
        _run(command, bundle, *_trust())
    monkeypatch.setenv("FEDEMB_POLICY", ".")
    with pytest.raises(Loaded):
        _run(command, bundle)


@pytest.mark.parametrize("command", COMMANDS)
def test_bundle_without_trusted_keys_is_not_loaded(bundle, command):
    with pytest.raises(InputError, match="its trust with --trust"):
        _run(command, bundle)
    if command == "embed":
        with pytest.raises(Loaded):
            _run(command, bundle, "--insecure")
    with pytest.raises(FedEmbError, match=r"[Nn]o release folder"):
        _run(command, bundle / "nowhere", *_trust())
