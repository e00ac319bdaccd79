"""Images have what they promise.

Needs podman (or docker) and the images of `make images`; `make test-containers` provides both.
"""

import json
import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIGHT = os.environ.get("FEDEMB_LIGHT_IMAGE", "localhost/fedemb-light:0.1.0")
CPU = os.environ.get("FEDEMB_CPU_IMAGE", "localhost/fedemb-cpu:0.1.0")


def _inspect(engine: dict[str, str], image: str) -> dict:
    import docker

    client = docker.DockerClient(base_url=engine["DOCKER_HOST"])
    try:
        return client.images.get(image).attrs
    except docker.errors.ImageNotFound:
        pytest.skip(f"no image {image} here: run `make test-containers`")


@pytest.mark.parametrize("image", [LIGHT, CPU])
def test_image_has_no_entrypoint_an_unprivileged_user_and_labels(engine, image):
    config = _inspect(engine, image)["Config"]
    assert not config.get("Entrypoint")
    assert config["User"] == "65532:65532"
    for label in ("title", "version", "revision", "licenses", "created"):
        assert config["Labels"][f"org.opencontainers.image.{label}"]


def _python(engine: dict[str, str], image: str, program: str) -> str:
    import docker

    _inspect(engine, image)
    client = docker.DockerClient(base_url=engine["DOCKER_HOST"])
    output = client.containers.run(
        image, ["python3", "-c", program], remove=True, network_mode="none", stderr=False
    )
    return output.decode()


def test_light_image_holds_accounting_ledger_and_gate_without_tensorflow(engine):
    program = (
        "import importlib, importlib.util as u\n"
        "assert u.find_spec('tensorflow') is None and u.find_spec('apache_beam') is None\n"
        "for step in ('plan_privacy', 'reserve_budget', 'account_privacy', 'gate_release'):\n"
        "    importlib.import_module('fedemb.steps.' + step)\n"
        "from fedemb.storage import buckets\n"
        "print('fine')"
    )
    assert _python(engine, LIGHT, program).strip() == "fine"


def test_both_images_carry_the_same_code_and_a_list_of_parts(engine):
    program = (
        "import json\n"
        "from fedemb.runtime.provenance import code_digest\n"
        "parts = json.load(open('/opt/fedemb/sbom.cdx.json'))['components']\n"
        "print(json.dumps([code_digest(), len(parts)]))"
    )
    light, cpu = (json.loads(_python(engine, image, program)) for image in (LIGHT, CPU))
    assert light[0] == cpu[0]
    assert 50 < light[1] < cpu[1]
