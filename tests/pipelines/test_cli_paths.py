"""Paths and files that no command can use: one sentence, exit code 2, no traceback, no waiting."""

import os

import pytest

from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.foundation.files import MOST_TEXT, read_regular
from fedemb.keys.trust import TrustStore
from fedemb.models.backbone_files import read_card
from fedemb.pipelines.cluster.compile import load_profile
from fedemb.pipelines.cluster.schedule import load_schedule
from fedemb.pipelines.run.load_config import load_config
from tests.kit.cli import ended

BUNDLE = "RELEASE/bundle"
TRUST = ("--trust", "RELEASE/ledger/trust.json")
NEW = ("--users-lower-bound", "60", "--epsilon", "8", "--alike=user")
PLACES = {
    "long": "a" * 5000,
    "s3": "s3://AKIAKEY:TOPSECRET@bucket",
    "gsm": "gsm://AKIAKEY:TOPSECRET@bucket",
}
"""What replaces AT: a path that is too long, or an address with a secret."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "words",
    [
        ("verify", "AT/x", *TRUST),
        ("verify", BUNDLE, "--trust", "AT"),
        ("verify", BUNDLE, *TRUST, "--ledger", "AT/x"),
        ("plan", "-c", "AT"),
        ("plan", "-c", "AT.yaml"),
        ("embed", "AT/x", "-m", BUNDLE, *TRUST, "-o", "e.parquet"),
        ("embed", "AT/x.parquet", "-m", BUNDLE, *TRUST, "-o", "e.parquet"),
        ("embed", ".", "-m", "AT", *TRUST),
        ("embed", ".", "-m", BUNDLE, *TRUST, "-o", "AT/e.parquet"),
        ("runs", "AT"),
        ("run", "--resume", "AT"),
        ("run", "--data", "AT/x.csv", "--runs", "runs"),
        ("run", "--set", "storage.keys=AT/x", "--runs", "runs"),
        ("run", "--set", "storage.ledger=AT/x", "--runs", "runs"),
        ("init", "--data", "AT/x.parquet", "-o", "m.yaml", "--public", "none", *NEW),
        ("init", "--data", "AT/x", "-o", "m.yaml", "--public", "none", *NEW),
        ("init", "--data", ".", "-o", "m.yaml", "--public", "AT/x.parquet", *NEW),
        ("init", "--data", ".", "-o", "AT", "--public", "none", *NEW),
        ("check-data", "--data", "AT/x.csv"),
        ("ledger", "show", "--ledger", "AT/x"),
        ("register", "AT/x", *TRUST, "--to", "mlflow+https://registry"),
        ("compile", "--output", "o.yaml", "--profile", "AT.yaml"),
        ("make-data", "AT/" + "a" * 5000),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_unusable_storage_uri_error_hides_its_secret(
    words, place, small_release, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = [word.replace("AT", PLACES[place]) for word in words]
    given = [word.replace("RELEASE", str(small_release)) for word in given]
    code, out, error = ended(*given)
    assert code in (2, 3, 4)
    assert "Traceback" not in error
    assert "TOPSECRET" not in out + error


def special(tmp_path, kind):
    path = tmp_path / "special.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 30 << 30)
    return path


READERS = {
    "configuration": load_config,
    "schedule": load_schedule,
    "profile": load_profile,
    "trust file": TrustStore.load,
    "backbone": read_card,
}


@pytest.mark.parametrize("kind", ["pipe", "device", "30 GB"])
@pytest.mark.parametrize("reader", sorted(READERS))
def test_special_file_instead_of_text_is_refused(tmp_path, reader, kind):
    with pytest.raises((ConfigError, ArtifactError, InputError)):
        READERS[reader](special(tmp_path, kind))


def test_text_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(MOST_TEXT))
    assert len(read_regular(path)) == MOST_TEXT
    with path.open("ab") as file:
        file.write(b"a")
    with pytest.raises(OSError, match="more than"):
        read_regular(path)
