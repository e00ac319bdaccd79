"""A released model over HTTP, from a process of its own: the same numbers as in this one."""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml

from fedemb.data.hostile_photos import hostile_photos
from fedemb.errors import InputError
from fedemb.pipelines.cli.main import app
from fedemb.serving import serve
from fedemb.serving.released import ReleasedModel
from fedemb.serving.serve import Bodies, TooMuch
from tests.conftest import REPOSITORY
from tests.kit.servers.free_port import free_port

BUNDLE = REPOSITORY / "tests" / "golden" / "v1" / "bundle"
TRUST = ("--trust", str(BUNDLE.parent / "ledger" / "trust.json"))
RUNNING = {}
"""Processes of servers by their addresses."""
IMAGE = f"registry.example/fedemb-serve@sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def server_log(tmp_path_factory):
    return tmp_path_factory.mktemp("serve") / "log"


@pytest.fixture(scope="module")
def server_process(server):
    return RUNNING[server]


@pytest.fixture(scope="module")
def server(server_log):
    """Address of the model, answered by `fedemb serve`."""
    port = free_port()
    command = [sys.executable, "-m", "fedemb", "serve", str(BUNDLE), *TRUST, "--port", str(port)]
    log = server_log.open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}/v1/models/glyphs"
    RUNNING[url] = process
    try:
        for _ in range(600):
            assert process.poll() is None, Path(log.name).read_text()
            try:
                if json.loads(urlopen(url, timeout=5).read())["ready"]:
                    break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(Path(log.name).read_text())
        yield url
    finally:
        process.terminate()
        process.wait(30)
        log.close()


@pytest.fixture(scope="module")
def model():
    return ReleasedModel(BUNDLE)


def post(url, body: bytes):
    request = Request(f"{url}:predict", body, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def instances(*files: bytes):
    found = [{"b64": base64.b64encode(data).decode()} for data in files]
    return json.dumps({"instances": found}).encode()


def test_photos_in_every_encoding_get_the_embedding_they_have_here(server, model):
    files = [photo.data for photo in hostile_photos()]
    status, answer = post(server, instances(*files))
    assert status == 200
    assert answer["embedding_space_id"] == model.space_id
    wanted = model.embed(np.stack([model.reader.read(data) for data in files]))
    found = np.array([item["embedding"] for item in answer["predictions"]], np.float32)
    assert len(files) > 30
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_what_is_no_photo_gets_a_reason_and_spoils_no_other(server):
    good = next(iter(hostile_photos())).data
    status, answer = post(server, instances(b"no photo", good, b""))
    assert status == 200
    first, second, third = answer["predictions"]
    assert first.keys() == third.keys() == {"reason"}
    assert len(second["embedding"]) == 8
    assert post(server, instances(b"no photo"))[0] == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not"),
        (b"[" * 100_000, "not"),
        (b'{"instances": []}', "1 to 256"),
        (json.dumps({"instances": [{}] * 257}).encode(), "1 to 256"),
        (b'{"instances": [{"b64": "#"}]}', "instance 0"),
        (b'{"instances": [[1, 2]]}', "instance 0"),
    ],
)
def test_request_that_is_none_is_said_so(server, body, says):
    status, answer = post(server, body)
    assert status == 400
    assert says in answer["error"]


def test_request_beyond_the_bound_is_refused_before_it_is_whole(server):
    from fedemb.serving.serve import MOST_BYTES

    status, answer = post(server, b" " * (MOST_BYTES + 1))
    assert status == 413
    assert "more than" in answer["error"]


def test_manifest_runs_this_very_command_on_the_bundle(capsys):
    address = ("--manifest", "gs://releases/glyphs/1.0", "--image", IMAGE)
    app(args=["serve", str(BUNDLE), *TRUST, *address], standalone_mode=False)
    pinned, service = yaml.safe_load_all(capsys.readouterr().out)
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    (container,) = service["spec"]["predictor"]["containers"]
    assert container["image"] == IMAGE
    assert {"name": "STORAGE_URI", "value": "gs://releases/glyphs/1.0"} in container["env"]
    program, command, _ = container["command"]
    assert (Path(program).name, command) == ("fedemb", "serve")
    from typer.main import get_command

    parsed = (
        get_command(app).commands["serve"].make_context("serve", [str(BUNDLE), *container["args"]])
    )
    assert parsed.params["port"] == container["ports"][0]["containerPort"]
    assert parsed.params["host"] == "0.0.0.0"
    assert parsed.params["name"] == "glyphs"
    assert json.loads(pinned["data"]["trust.json"]) == json.loads(Path(TRUST[1]).read_bytes())
    (volume,) = service["spec"]["predictor"]["volumes"]
    assert volume["configMap"]["name"] == pinned["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert parsed.params["trust"] == Path(mount["mountPath"], "trust.json")


def test_manifest_names_an_image_by_digest():
    address = ("--manifest", "gs://releases/glyphs/1.0", "--image", "fedemb:1")
    words = ["serve", str(BUNDLE), *TRUST, *address]
    with pytest.raises(InputError, match="no digest"):
        app(args=words, standalone_mode=False)


async def chunks(*sizes, error=None):
    for size in sizes:
        yield bytes(size)
    if error is not None:
        raise error


def test_bodies_of_all_requests_together_are_bounded():
    async def scenario():
        bodies = Bodies(most=100)
        async with bodies.read(chunks(40, 30)) as first:
            with pytest.raises(TooMuch) as refused:
                async with bodies.read(chunks(20, 20)):
                    pytest.fail("it is more than all may have")
            assert refused.value.status == 503
            async with bodies.read(chunks(30)) as second:
                assert (len(first), len(second)) == (70, 30)
        with pytest.raises(OSError, match="gone"):
            async with bodies.read(chunks(90, error=OSError("gone"))):
                pytest.fail("the client left")
        async with bodies.read(chunks(100)) as third:
            assert len(third) == 100

    asyncio.run(scenario())


def test_client_that_sends_slowly_holds_no_memory_for_ever(monkeypatch):
    monkeypatch.setattr(serve, "MOST_SECONDS", 0.05)

    async def slow():
        yield b"a"
        await asyncio.sleep(60)

    async def scenario():
        bodies = Bodies(most=1)
        with pytest.raises(TimeoutError):
            async with bodies.read(slow()):
                pytest.fail("the body never ends")
        async with bodies.read(chunks(1)):
            pass

    asyncio.run(scenario())


def test_client_that_disconnects_costs_one_line(server, server_log):
    before = server_log.read_text().count("\n")
    host, port = server.removeprefix("http://").partition("/")[0].split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/models/glyphs:predict HTTP/1.1\r\nHost: a\r\n"
                b"Content-Length: 1000000\r\n\r\n{"
            )
    for _ in range(100):
        text = server_log.read_text()
        if text.count("disconnected") == 3:
            break
        time.sleep(0.1)
    assert "Traceback" not in text
    assert text.count("\n") - before == 3
    assert post(server, instances(b"no photo"))[0] == 200


@pytest.mark.long
def test_memory_of_a_server_under_many_large_requests_fits_its_manifest(server, server_process):
    body = b'{"instances": [{"b64": "' + b"A" * (60 << 20) + b'"}]}'
    with ThreadPoolExecutor(16) as pool:
        codes = [status for status, _ in pool.map(lambda _: post(server, body), range(16))]
    assert set(codes) <= {200, 503}
    assert 200 in codes
    peak = Path(f"/proc/{server_process.pid}/status").read_text()
    (line,) = [line for line in peak.splitlines() if line.startswith("VmHWM")]
    assert int(line.split()[1]) < 2 << 20  # KiB, of the 2 GiB of the manifest
