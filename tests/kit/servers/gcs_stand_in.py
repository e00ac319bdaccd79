"""gcp-storage-emulator with the preconditions it lacks; run as `python gcs_stand_in.py PORT`.

A generation that does not match is answered with 412 (to replace anything in a bucket
`...-create-only` with 403), a missing bucket with the message of the real service, and a request
whose body was cut changes nothing. The emulator serves one request at a
time, so check and change are one step.
"""

import sys
import time
from functools import wraps
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

CREATE_ONLY, READ_ONLY = "-create-only", "-read-only"
"""In buckets with these names, replacing or writing is denied; rights are checked first."""


def _generation(storage, bucket, name):
    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


def _refuse(response, status, message):
    response.status = status
    response.json({"error": {"code": int(status), "message": message}})


def _guard(handler, target):
    @wraps(handler)
    def guarded(request, response, storage, *args, **kwargs):
        bucket, name = target(request, storage)
        wanted = request.query.get("ifGenerationMatch", [None])[0]
        try:
            storage.get_bucket(bucket) or _missing()
        except NotFound:
            return _refuse(response, HTTPStatus.NOT_FOUND, "The specified bucket does not exist.")
        there = name and _generation(storage, bucket, name) != "0"
        forbidden = bucket.endswith(READ_ONLY) or (there and bucket.endswith(CREATE_ONLY))
        if handler.__name__ == "insert" and forbidden:
            request.data  # read the body before the answer  # noqa: B018
            message = "Caller does not have the access to the object that this needs."
            return _refuse(response, HTTPStatus.FORBIDDEN, message)
        if wanted is not None and name and wanted != _generation(storage, bucket, name):
            request.data  # read the body before the answer  # noqa: B018
            return _refuse(
                response,
                HTTPStatus.PRECONDITION_FAILED,
                "At least one of the pre-conditions you specified did not hold.",
            )
        return handler(request, response, storage, *args, **kwargs)

    return guarded


def _missing():
    raise NotFound


def _of_upload(request, storage):
    if "upload_id" in request.query:
        found = storage.get_resumable_file_obj(request.query["upload_id"][0])
        return found["bucket"], found["name"]
    name = request.query.get("name", [None])[0]
    if name is None and isinstance(request.data, dict):
        name = request.data.get("meta", request.data).get("name")
    return request.params["bucket_name"], name


def _of_object(request, storage):
    return request.params["bucket_name"], request.params.get("object_id")


def _of_destination(request, storage):
    return request.params["dest_bucket_name"], request.params["dest_object_id"]


TARGETS = {
    "insert": _of_upload,
    "upload_partial": _of_upload,
    "get": _of_object,
    "ls": _of_object,
    "download": _of_object,
    "delete": _of_object,
    "patch": _of_object,
    "compose": _of_object,
    "copy": _of_destination,
    "rewrite": _of_destination,
}
GUARDED = {
    getattr(objects, name): _guard(getattr(objects, name), TARGETS[name]) for name in TARGETS
}


def _whole_body(read):
    """A request cut in its body never happened; the emulator would keep the part that came."""

    @wraps(read)
    def reading(handler):
        data = read(handler)
        if len(data or b"") < int(handler.headers.get("Content-Length") or 0):
            raise ConnectionAbortedError
        return data

    return reading


def main(port: int) -> None:
    """Serves from memory until the process is ended."""
    server._read_raw_data = _whole_body(server._read_raw_data)
    server.HANDLERS = tuple(
        (pattern, {method: GUARDED.get(handler, handler) for method, handler in methods.items()})
        for pattern, methods in server.HANDLERS
    )
    objects.insert = GUARDED[objects.insert]
    running = server.create_server("127.0.0.1", port, in_memory=True)
    running.start()
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]))
