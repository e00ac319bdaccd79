"""A secret in an address is refused where addresses are parsed, and printed by no command."""

import contextlib
import re
from pathlib import Path

import pytest

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.addresses import credentials_in, redacted, split_address
from fedemb.keys import open_key_store
from fedemb.pipelines.cli import main as cli
from fedemb.storage import open_store

ROOT = Path(__file__).parents[2]
BUNDLE = "RELEASE/bundle"
TRUST = ("--trust", "RELEASE/ledger/trust.json")
NEW = ("--users-lower-bound", "60", "--epsilon", "8", "--alike=user")
PARSERS = {
    "components/fedemb/foundation/addresses.py",
    "pipelines/cluster/doctor.py",  # of a configuration
}


@pytest.mark.parametrize("scheme", ["s3", "gsm"])
@pytest.mark.parametrize(
    "words",
    [
        ("init", "--data", "AT/x.parquet", "-o", "TMP/m.yaml", "--public", "none", *NEW),
        ("init", "--data", "AT/x", "-o", "TMP/m.yaml", "--public", "none", *NEW),
        ("init", "--data", "TMP", "-o", "TMP/m.yaml", "--public", "AT/x.parquet", *NEW),
        ("check-data", "--data", "AT/x.csv"),
        ("run", "--data", "AT/x.csv", "--runs", "TMP/runs"),
        ("run", "--set", "storage.keys=AT/x", "--runs", "TMP/runs"),
        ("run", "--set", "storage.ledger=AT/x", "--runs", "TMP/runs"),
        ("embed", "AT/x", "-m", BUNDLE, *TRUST, "-o", "TMP/e.parquet"),
        ("embed", "AT/x.parquet", "-m", BUNDLE, *TRUST, "-o", "TMP/e.parquet"),
        ("embed", "TMP", "-m", BUNDLE, *TRUST, "-o", "AT/e.parquet"),
        ("verify", "AT/x", *TRUST),
        ("verify", BUNDLE, *TRUST, "--ledger", "AT/x"),
        ("ledger", "show", "--ledger", "AT/x"),
        ("register", "AT/x", *TRUST, "--to", "mlflow+https://registry"),
    ],
    ids=lambda words: " ".join(words[:3]).replace("TMP", "folder"),
)
def test_no_command_shows_a_secret_of_an_address(words, scheme, small_release, tmp_path, capsys):
    at = f"{scheme}://AKIAKEY:TOPSECRET@bucket"
    names = {"AT/": f"{at}/", "TMP": str(tmp_path), "RELEASE": str(small_release)}
    given = list(words)
    for name, meant in names.items():
        given = [word.replace(name, meant) for word in given]
    with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as stopped:
        cli.main(given)
    shown = capsys.readouterr()
    assert stopped.value.code not in (0, 1)
    assert "TOPSECRET" not in shown.out + shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:TOPSECRET@bucket/x",
        "gs://TOPSECRET@bucket/x",
        "s3://bucket:9000/x",
        "gs://bucket/x?X-Goog-Signature=TOPSECRET",
        "s3://bucket/x?AWSAccessKeyId=a&Signature=TOPSECRET",
        "s3://[TOPSECRET@x",
        "s3://KEY:TOP/TOPSECRET@bucket/x",
        "s3://KE/Y:TOPSECRET@bucket/x",
    ],
)
def test_address_with_a_secret_is_refused_without_it(address):
    for parse in (split_address, open_store, open_key_store):
        with pytest.raises((InputError, ConfigError)) as refused:
            parse(address)
        assert "TOPSECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["gs://bucket/a@b/c", "file:///a:b@c", "/tmp/a:b@c", "me@example.org", "s3://b/x y"]
)
def test_address_without_a_secret_stays(address):
    assert not credentials_in(address)
    assert redacted(address) == address


def test_text_loses_the_secrets_of_its_addresses():
    text = "no s3://K:TOP@b/x, s3:/K:TOP@b/x and https://h/x?a=1&X-Amz-Signature=TOP&b=2"
    assert redacted(text) == (
        "no s3://***@b/x, s3:/***@b/x and https://h/x?a=1&X-Amz-Signature=***&b=2"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"https:\\u:TOP@h", r"https:\\***@h"),
        ("s3:K:TOP@b", "s3:***@b"),
        ("https://h/?api_key=TOP&b=2", "https://h/?api_key=***&b=2"),
        ("s3://b?access_token=TOP", "s3://b?access_token=***"),
        ("s3://b/user_key=5/x and cpu=h:5000/x@sha256:0", None),
    ],
)
def test_secrets_of_mistyped_addresses_and_queries_are_not_shown(text, shown):
    assert redacted(text) == (shown or text)


def test_addresses_are_parsed_in_one_place():
    found = {
        path.relative_to(ROOT).as_posix()
        for package in (ROOT / "components", ROOT / "pipelines")
        for path in package.rglob("*.py")
        if re.search(r"\burl(split|parse)\b", path.read_text())
    }
    assert found == PARSERS
