"""What goes wrong between us and a store: a sentence, quickly, and nothing half visible."""

import os
import time
from contextlib import contextmanager

import pytest

from fedemb.errors import StorageError
from fedemb.storage import LARGEST, open_store
from tests.kit.servers.cutting_proxy import CuttingProxy
from tests.kit.servers.receiver import Receiver

SECONDS = 20
SHARD = 24 << 20
BACKENDS = [("gcs", "STORAGE_EMULATOR_HOST"), ("s3", "AWS_ENDPOINT_URL")]


@contextmanager
def _sentence(match: str):
    start = time.monotonic()
    with pytest.raises(StorageError, match=match) as caught:
        yield
    assert time.monotonic() - start < SECONDS
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.fixture(autouse=True)
def short_retries(monkeypatch):
    """Gives up sooner than in production, where it is ten seconds."""
    monkeypatch.setattr("fedemb.storage.buckets.RETRY_SECONDS", 3.0)


@pytest.fixture(params=BACKENDS, ids=["gs", "s3"])
def through_proxy(request, monkeypatch):
    """Gives a function that opens a fresh store through a proxy with the given faults."""
    name, variable = request.param
    uri = request.getfixturevalue(f"{name}_store_uri")
    port = request.getfixturevalue(f"{name}_port")
    proxies = []

    def open_through(**faults):
        proxy = CuttingProxy(port, **faults)
        proxies.append(proxy)
        direct = open_store(uri)
        direct.exists("warm")
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        return open_store(uri), direct, proxy

    yield open_through
    for proxy in proxies:
        proxy.__exit__()


@pytest.fixture
def shard(tmp_path):
    """A large file."""
    path = tmp_path / "shard.arrayrecord"
    path.write_bytes(os.urandom(SHARD))
    return path


@pytest.mark.parametrize("uri", ["gs://no-such-bucket-here/x", "s3://no-such-bucket-here/x"])
def test_missing_bucket_is_a_storage_error(uri, gcs_environment, s3_environment):
    store = open_store(uri)
    for act in (
        lambda: store.write("a", b"x"),
        lambda: store.create("a", b"x"),
        lambda: store.read("a"),
        store.list,
        lambda: store.exists("a"),
        lambda: list(store.entries()),
    ):
        with _sentence("bucket no-such-bucket-here does not exist"):
            act()


@pytest.mark.parametrize(
    ("uri", "who"), [("gs://bucket/x", "Google credentials"), ("s3://bucket/x", "AWS credentials")]
)
def test_missing_credentials_are_a_storage_error(uri, who, monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_")) or name == "STORAGE_EMULATOR_HOST":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with _sentence(f"no {who}"):
        open_store(uri).read("a")


@pytest.mark.long
@pytest.mark.parametrize(("name", "variable"), BACKENDS)
def test_refused_connection_is_a_storage_error(name, variable, request, monkeypatch):
    uri = request.getfixturevalue(f"{name}_store_uri")
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with _sentence("connection failed"):
        open_store(uri).read("a")


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "words"), [(403, "permission denied"), (503, "server answered")]
)
@pytest.mark.parametrize(("scheme", "variable"), [("gs", BACKENDS[0][1]), ("s3", BACKENDS[1][1])])
def test_denied_or_failing_request_is_a_storage_error(  # noqa: PLR0917
    monkeypatch, request, s3_environment, scheme, variable, status, words
):
    server = Receiver()
    request.addfinalizer(server.close)
    server.status = status
    monkeypatch.setenv(variable, server.url)
    store = open_store(f"{scheme}://bucket/root")
    with _sentence(words):
        store.create("a", b"x")
    with _sentence(words):
        store.read("a")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_run_with_a_missing_store_creates_nothing(
    scheme, gcs_environment, s3_environment, tmp_path
):
    from fedemb.pipelines.run.command import prepare

    stores = {"ledger": f"{scheme}://no-such-bucket-here/ledger", "keys": str(tmp_path / "keys")}
    overrides = [f"storage.{name}={place}" for name, place in stores.items()]
    overrides += ["data.source.uri=/photos.parquet"]
    with _sentence("bucket no-such-bucket-here does not exist"):
        prepare("quickstart", overrides, tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_large_shard_arrives_through_a_connection_cut_now_and_then(through_proxy, shard):
    store, direct, proxy = through_proxy(upload_limit=4 << 20, healthy_after=1)
    store._upload(shard, "shard", "0" * 64)
    assert proxy.cuts >= 1
    assert direct.read("shard", LARGEST) == shard.read_bytes()


@pytest.mark.long
def test_upload_cut_for_good_leaves_nothing_visible(through_proxy, shard, tmp_path):
    store, direct, proxy = through_proxy(upload_limit=1 << 20)
    with _sentence("connection failed"):
        store.upload_tree(shard.parent, "tree")
    assert proxy.cuts >= 1
    assert direct.list() == []


def test_create_succeeds_when_the_response_to_its_own_write_was_lost(through_proxy):
    store, direct, proxy = through_proxy(swallow_answers=1)
    store.create("entry", b"mine")
    assert proxy.cuts == 1
    assert direct.read("entry") == b"mine"
    with pytest.raises(FileExistsError):
        store.create("entry", b"mine")


@pytest.mark.long
def test_slow_listing_is_waited_for(through_proxy):
    store, direct, _ = through_proxy(delay=1.5)
    direct.write("a/b", b"x")
    assert store.list("a/") == ["a/b"]
