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
LONG = "a" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ("verify", LONG, *TRUST),
        ("verify", BUNDLE, "--trust", LONG),
        ("verify", BUNDLE, *TRUST, "--ledger", LONG),
        ("plan", "-c", LONG),
        ("plan", "-c", f"{LONG}.yaml"),
        ("embed", LONG, "-m", BUNDLE, *TRUST),
        ("embed", ".", "-m", LONG, *TRUST),
        ("embed", ".", "-m", BUNDLE, *TRUST, "-o", LONG),
        ("runs", LONG),
        ("run", "--resume", LONG),
        ("init", "--data", LONG, "-o", "m.yaml", "--public", "none", *NEW),
        ("init", "--data", ".", "-o", LONG, "--public", "none", *NEW),
        ("check-data", "--data", LONG),
        ("ledger", "show", "--ledger", LONG),
        ("compile", "--output", "o.yaml", "--profile", f"{LONG}.yaml"),
        ("make-data", LONG),
    ],
    ids=lambda words: " ".join(word if len(word) < 60 else "LONG" for word in words[:4]),
)
def test_path_that_is_too_long_is_one_sentence(words, small_release, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [word.replace("RELEASE", str(small_release)) for word in words]
    code, _, error = ended(*given)
    assert code in (2, 3, 4)
    assert "Traceback" not in error


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
def test_text_in_what_is_no_file_of_its_size_is_refused_at_once(tmp_path, reader, kind):
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
