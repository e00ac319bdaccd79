"""The whole pipeline with input, ledger and releases in a bucket."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedemb.storage import join, open_store
from tests.kit.pipeline_runs.whole_run import SMALL_EMBEDDING

pytestmark = pytest.mark.slow

SETTINGS = [part for item in (*SMALL_EMBEDDING, "mechanism.rounds=2") for part in ("--set", item)]


def _fedemb(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedemb", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_whole_run_in_a_bucket(kind, tmp_path, request):
    uri: str = request.getfixturevalue(f"{kind}_store_uri")
    keys, trust = str(tmp_path / "keys"), str(tmp_path / "trust.json")
    drawn = _fedemb(
        *("make-data", str(tmp_path / "data"), "--users", "400", "--images-per-user", "3")
    )
    assert drawn.returncode == 0, drawn.stderr
    photos = join(uri, "input", "private.parquet")
    open_store(uri).write(
        "input/private.parquet", next((tmp_path / "data").rglob("private*.parquet")).read_bytes()
    )
    stores = {"private_root": "private", "ledger": "ledger", "releases": "releases"}
    run = (
        *("run", "--runs", str(tmp_path / "runs"), "--run-id", "first", "--data", photos),
        *SETTINGS,
        *("--set", f"storage.keys={keys}"),
        *(
            word
            for name, part in stores.items()
            for word in ("--set", f"storage.{name}={uri}/{part}")
        ),
    )
    refused = _fedemb(*run)
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "fedemb ledger init" in refused.stderr
    assert not (tmp_path / "runs" / "first").exists()

    made = _fedemb(
        *("ledger", "init", "--config", "quickstart", "--ledger", join(uri, "ledger")),
        *("--keys", keys, "--trust-output", trust, *SETTINGS),
    )
    assert made.returncode == 0, made.stderr
    done = _fedemb(*run)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert lines["release"].startswith(f"{uri}/releases/embedding/first/")

    # Nothing lasting and nothing Raw on this machine but the keys; every kind in its own place.
    local = tmp_path / "runs" / "first"
    assert not list((local / "private").iterdir())
    assert not (local / "policy").exists()
    assert not (local / "releases").exists()
    names = open_store(uri).list()
    assert {name.split("/")[0] for name in names} == {
        *("input", "ledger", "private", "releases"),
    }
    raw = [name for name in names if name.split("/")[-1].startswith(("users-", "evaluation-"))]
    assert raw
    assert all(name.startswith("private/first/") for name in raw)
    # The rollback marks below `ledger` are digests of records, which the next records contain.
    folders = [path for path in Path(keys).iterdir() if path.name != "ledger"]
    secrets = [path.read_bytes() for one in folders for path in one.rglob("*") if path.is_file()]
    assert len(secrets) > 12
    for name in names:
        content = open_store(uri).read(name)
        assert not any(secret and secret in content for secret in secrets), name
        assert not any(secret and secret.hex().encode() in content for secret in secrets), name

    for address in (f"{uri}/releases/embedding/first", lines["release"]):
        checked = _fedemb("verify", address, "--trust", trust, "--ledger", f"{uri}/ledger")
        assert checked.returncode == 0, checked.stderr
        assert checked.stdout.startswith("verified: embedding first, of run first")

    before = {entry.name: entry.version for entry in open_store(uri).entries()}
    again = _fedemb("run", "--resume", str(local))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "no step is run again" in again.stdout
    assert {entry.name: entry.version for entry in open_store(uri).entries()} == before
