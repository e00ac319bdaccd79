"""Serves a released model over HTTP, in the protocol of KServe V1 and TensorFlow Serving.

    GET  /v1/models/NAME            {"name": NAME, "ready": true}
    POST /v1/models/NAME:predict    {"instances": [{"b64": "..."}, ...]}

A request contains photo files as a phone stores them, decoded by the bundle's own preprocessing. An
unreadable photo gets a reason and does not affect the other photos. (V1 inference protocol.)
"""

from __future__ import annotations

import base64
import json
import logging
from asyncio import Semaphore, timeout
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from fedemb.data.photos import BadImageError
from fedemb.foundation.canonical_json import Json, JsonObject, ToJson
from fedemb.foundation.extras import missing_extra
from fedemb.serving.released import ReleasedModel

if TYPE_CHECKING:
    from fastapi import FastAPI

MOST_BYTES = 64 * 2**20
"""Maximum bytes of one request."""
MOST_TOGETHER = 3 * MOST_BYTES
"""Maximum bytes of all requests that are read or answered at the same time."""
MOST_SECONDS = 120.0
"""Maximum seconds for a client to send its request."""
PREDICTIONS = 2
"""Maximum requests that the model processes at the same time; others wait."""
MOST_PHOTOS = 256
"""Maximum photos of one request."""


_BUSY = 503
_log = logging.getLogger(__name__)


class TooMuch(Exception):
    """A request, or all requests, exceed the byte limit; `status` is the HTTP status."""

    def __init__(self, problem: str, status: int):
        super().__init__(problem)
        self.status = status


class Bodies:
    """The bodies of the requests in flight, with a shared byte limit."""

    def __init__(self, most: int = MOST_TOGETHER):
        self._most, self._held = most, 0

    @asynccontextmanager
    async def read(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytearray]:
        """Reads a body, and counts its bytes until the block ends.

        Raises:
          TooMuch: the body (413), or all bodies together (503), are too large.
          TimeoutError: the client is too slow.
        """
        body, dropped = bytearray(), 0
        problem: TooMuch | None = None
        try:
            async with timeout(MOST_SECONDS):
                async for chunk in stream:  # the claimed length is not trusted
                    if problem is not None:  # respond only after the request is sent
                        dropped += len(chunk)
                        if dropped > MOST_BYTES:
                            break
                        continue
                    problem = self._refused(len(body) + len(chunk), len(chunk))
                    if problem is None:
                        self._held += len(chunk)
                        body += chunk
                    else:
                        self._held -= len(body)
                        body.clear()
            if problem is not None:
                raise problem
            yield body
        finally:
            self._held -= len(body)

    def _refused(self, length: int, more: int) -> TooMuch | None:
        if length > MOST_BYTES:
            return TooMuch(f"the request has more than {MOST_BYTES} bytes", 413)
        if self._held + more > self._most:
            return TooMuch("too many requests at once; try again later", _BUSY)
        return None


class BadRequest(Exception):
    """The problem with a request, as a sentence."""


def predict(model: ReleasedModel, instances: Sequence[Json]) -> list[JsonObject]:
    """Returns the model's output for each photo `{"b64": text}`, a file in base64.

    Returns:
      `{"embedding": [...]}`, for classifiers `{"probabilities": [...]}`, or `{"reason": text}`.

    Raises:
      BadRequest: an instance has another form.
    """
    pixels: list[np.ndarray] = []
    reasons: list[str | None] = []
    for number, instance in enumerate(instances):
        try:
            pixels.append(model.reader.read(_file(instance, number)))
            reasons.append(None)
        except BadImageError as error:
            reasons.append(error.reason)
    found = iter(model.embed(np.stack(pixels)).tolist() if pixels else ())
    name = "probabilities" if model.config.model.classes else "embedding"
    return [{"reason": reason} if reason else {name: next(found)} for reason in reasons]


def _file(instance: Json, number: int) -> bytes:
    try:
        text = instance["b64"] if isinstance(instance, dict) else None
        if not isinstance(text, str):
            raise TypeError
        return base64.b64decode(text, validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(f'instance {number} is not {{"b64": "..."}} with base64 in it') from error


def instances_of(body: bytes | bytearray) -> list[Json]:
    """Parses the instances of a request.

    Raises:
      BadRequest: the body is not valid JSON of the protocol, or exceeds a limit.
    """
    try:
        instances = json.loads(body)["instances"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRequest('the request is not {"instances": [...]}') from error
    if not isinstance(instances, list) or not 1 <= len(instances) <= MOST_PHOTOS:
        raise BadRequest(f"instances must be a list of 1 to {MOST_PHOTOS} photos")
    return instances


def make_app(model: ReleasedModel, name: str) -> FastAPI:
    """Returns the application for any ASGI server; `name` is in the address of the model."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect

    app = FastAPI(title="fedemb", docs_url=None, redoc_url=None, openapi_url=None)
    address = f"/v1/models/{name}"

    @app.get("/")
    @app.get(address)
    async def ready() -> dict[str, str | bool]:
        return {"name": name, "ready": True, "embedding_space_id": model.space_id}

    bodies, turn = Bodies(), Semaphore(PREDICTIONS)

    async def answer(request: Request) -> JSONResponse:
        try:
            async with bodies.read(request.stream()) as body, turn:
                found = await run_in_threadpool(lambda: predict(model, instances_of(body)))
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except TooMuch as error:
            retry = {"Retry-After": "1"} if error.status == _BUSY else None
            return JSONResponse({"error": str(error)}, status_code=error.status, headers=retry)
        except TimeoutError:
            problem = f"the request took more than {MOST_SECONDS:.0f} s to arrive"
            return JSONResponse({"error": problem}, status_code=408)
        except ClientDisconnect:
            _log.warning("a client disconnected before its request was whole")
            return JSONResponse({"error": "disconnected"}, status_code=400)  # not delivered
        return JSONResponse({"predictions": found, "embedding_space_id": model.space_id})

    app.add_route(f"{address}:predict", answer, methods=["POST"])
    return app


def run(model: ReleasedModel, name: str, host: str, port: int) -> None:
    """Serves until the process is stopped.

    Raises:
      ConfigError: FastAPI or uvicorn is not installed.
    """
    try:
        import uvicorn

        app = make_app(model, name)
    except ModuleNotFoundError as error:
        raise (missing_extra(error) or error) from error
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def manifests(name: str, uri: str, image: str, trust: str) -> list[Mapping[str, ToJson]]:
    """Returns KServe's InferenceService for a published bundle, and the pinned keys.

    Args:
      name: name of the service and of the model in its address.
      uri: address of the bundle; KServe mounts it at `/mnt/models`.
      image: image of the flavour `serve`, with a digest.
      trust: text of the pinned keys.
    """
    port, models, keys = 8080, "/mnt/models", "/mnt/trust"
    pinned = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-trust"},
        "data": {"trust.json": trust},
    }
    container = {
        "name": "kserve-container",
        "image": image,
        "command": ["/opt/fedemb/bin/fedemb", "serve", models],
        "args": [
            *("--trust", f"{keys}/trust.json", "--name", name),
            *("--host", "0.0.0.0", "--port", str(port)),
        ],
        "env": [{"name": "STORAGE_URI", "value": uri}],
        "volumeMounts": [{"name": "trust", "mountPath": keys, "readOnly": True}],
        "ports": [{"containerPort": port, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": f"/v1/models/{name}", "port": port}},
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    volume = {"name": "trust", "configMap": {"name": f"{name}-trust"}}
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"predictor": {"containers": [container], "volumes": [volume]}},
    }
    return [pinned, service]
