"""A released model over HTTP, from a process of its own: the same numbers as in this one."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml

from fedemb.data.hostile_photos import hostile_photos
from fedemb.embedding.released import ReleasedModel
from fedemb.errors import InputError
from fedemb.pipelines.cli.main import app
from tests.conftest import REPOSITORY

BUNDLE = REPOSITORY / "tests" / "golden" / "v1" / "bundle"
TRUST = ("--trust", str(BUNDLE.parent / "ledger" / "trust.json"))
IMAGE = f"registry.example/fedemb-serve@sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of the model, answered by `fedemb serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fedemb", "serve", str(BUNDLE), *TRUST, "--port", str(port)]
    log = (tmp_path_factory.mktemp("serve") / "log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}/v1/models/glyphs"
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
    from fedemb.embedding.serve import MOST_BYTES

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
