"""Releases in buckets: of many writers one wins, nothing mixes, and `fedemb verify` reads them."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fedemb.errors import InputError, Refused
from fedemb.keys import open_key_store
from fedemb.keys.trust import trust_of
from fedemb.release.bundle import Marker
from fedemb.steps import release_model
from fedemb.storage import join, open_store
from tests.kit.pipeline_runs import honest_run
from tests.kit.pipeline_runs.forked import SERVER
from tests.kit.pipeline_runs.whole_run import SMALL_EMBEDDING, fedemb, finish
from tests.kit.verified import problems_of

AT_NIGHT_ON_S3 = ["gcs", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(params=["gcs", "s3"])
def releases(request) -> str:
    """A fresh store of releases."""
    return join(request.getfixturevalue(f"{request.param}_store_uri"), "releases")


@pytest.fixture
def run(allowed_run, tmp_path):
    return honest_run.copy_of(allowed_run, tmp_path / "run")


def _release(run, releases, document="release.json"):
    with honest_run.stand_in_for_serving():
        return release_model.run(run.context(releases=releases, release=run.root / document))


def _problems(run, uri):
    with honest_run.stand_in_for_serving():
        return problems_of(uri, run.trust, run.ledger_uri)


@pytest.mark.parametrize("releases", AT_NIGHT_ON_S3, indirect=True)
def test_release_in_a_bucket_verifies_by_its_name_and_by_its_folder(run, releases):
    document = _release(run, releases)
    assert document["uri"].startswith(f"{releases}/glyphs/1.0/")
    assert _problems(run, f"{releases}/glyphs/1.0") == []
    assert _problems(run, document["uri"]) == []
    assert _release(run, releases) == document
    assert len(run.ledger().state.attempts["monday", 1].releases) == 1


@pytest.mark.parametrize("releases", AT_NIGHT_ON_S3, indirect=True)
def test_bundle_without_its_marker_is_not_a_release(run, releases, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    store = type(open_store(releases))
    create = store.create
    monkeypatch.setattr(store, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        _release(run, releases)
    monkeypatch.setattr(store, "create", create)
    assert "glyphs/1.0.json" not in open_store(releases).list()
    with pytest.raises(InputError, match="neither a marker nor a bundle"):
        _problems(run, f"{releases}/glyphs/1.0")
    _release(run, releases)
    assert _problems(run, f"{releases}/glyphs/1.0") == []


@pytest.mark.parametrize("releases", AT_NIGHT_ON_S3, indirect=True)
def test_release_copied_to_another_version_is_detected(run, releases):
    """A writer of the store presents an old signed release as a new one."""
    document = _release(run, releases)
    store = open_store(releases)
    store.write("glyphs/2.0.json", store.read("glyphs/1.0.json"))
    for name in store.list(f"{document['uri'].removeprefix(releases)[1:]}/"):
        store.write(name.replace("/1.0/", "/2.0/"), store.read(name))
    tree = document["uri"].rpartition("/")[2]
    for name in store.list("glyphs/1.0/"):
        if name.endswith(f"{tree}.tree"):
            store.write(name.replace("/1.0/", "/2.0/"), store.read(name))
    (problem,) = _problems(run, f"{releases}/glyphs/2.0")
    assert "stands under another name" in problem


@pytest.mark.parametrize("releases", AT_NIGHT_ON_S3, indirect=True)
def test_release_yields_to_a_bundle_published_concurrently(run, releases, tmp_path, monkeypatch):
    """The loser's bundle must not be recorded under the winner's marker."""
    again = honest_run.copy_of(run, tmp_path / "again")
    again.do_account()
    again.do_gate()
    winner = _release(run, releases)
    read, looked = Marker.read, []

    def nothing_at_first(marker):
        looked.append(marker)
        return read(marker) if looked[1:] else None

    with monkeypatch.context() as raced:
        raced.setattr(Marker, "read", nothing_at_first)
        with pytest.raises(Refused, match="at the same time"):
            _release(again, releases)
    assert _release(again, releases)["bundle_sha"] == winner["bundle_sha"]


def _racer(root, releases, environment, barrier, answers):
    os.environ.update(environment)
    number = int(root.name)
    run = honest_run.at(root, f"run-{number}")
    barrier.wait(300)
    try:
        _release(run, releases)
        answers.put((number, "released"))
    except Exception as error:  # the assertions below say whether it is the right one
        answers.put((number, str(error)))


@pytest.mark.long
@pytest.mark.parametrize("releases", AT_NIGHT_ON_S3, indirect=True)
def test_exactly_one_of_two_concurrent_releases_of_a_version_wins(tmp_path, releases):
    """Two runs of one policy, each with its own model, and the same name and version."""
    policy = tmp_path / "policy"
    trust_of(open_key_store(str(policy / "keys")))
    for number in range(2):
        run = honest_run.start(tmp_path / f"{number}", f"run-{number}", policy).until_gate()
        run.do_gate()
        shutil.copytree(policy, tmp_path / f"{number}" / "policy", dirs_exist_ok=True)
    barrier, answers = SERVER.Barrier(2), SERVER.Queue()
    racers = [
        SERVER.Process(
            target=_racer,
            args=(tmp_path / f"{number}", releases, dict(os.environ), barrier, answers),
        )
        for number in range(2)
    ]
    for racer in racers:
        racer.start()
    found = dict(answers.get(timeout=400) for _ in racers)
    for racer in racers:
        racer.join(60)
    winners = [number for number, answer in found.items() if answer == "released"]
    assert len(winners) == 1, found
    (lost,) = [answer for answer in found.values() if answer != "released"]
    assert "another release.version" in lost or "at the same time" in lost
    marker = json.loads(open_store(releases).read("glyphs/1.0.json"))
    assert marker["run_id"] == f"run-{winners[0]}"
    winner = honest_run.at(tmp_path / f"{winners[0]}", marker["run_id"])
    assert _problems(winner, f"{releases}/glyphs/1.0") == []  # whole: no file of the loser's


# ---- The whole pipeline with input, ledger and releases in a bucket ----


SETTINGS = [part for item in (*SMALL_EMBEDDING, "mechanism.rounds=2") for part in ("--set", item)]


def _fedemb(*words: str) -> subprocess.CompletedProcess[str]:
    return finish(fedemb(*words))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_run_with_all_stores_in_buckets_releases_and_leaks_no_key(kind, tmp_path, request):
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
    assert lines["release"] == f"{uri}/releases/embedding/first"

    # Nothing lasting and nothing Raw on this machine but the keys; every kind in its own place.
    local = tmp_path / "runs" / "first"
    assert not list((local / "private").iterdir())
    assert not (local / "policy").exists()
    assert not (local / "releases").exists()
    names = open_store(uri).list()
    assert {name.split("/")[0] for name in names} == {*("input", "ledger", "private", "releases")}
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

    checked = _fedemb("verify", lines["release"], "--trust", trust, "--ledger", f"{uri}/ledger")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("verified: embedding first, of run first")

    before = {entry.name: entry.version for entry in open_store(uri).entries()}
    again = _fedemb("run", "--resume", str(local))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "no step is run again" in again.stdout
    assert {entry.name: entry.version for entry in open_store(uri).entries()} == before
