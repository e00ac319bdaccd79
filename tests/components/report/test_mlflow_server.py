"""A tracking server of MLflow that does not answer as MLflow does."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedemb.errors import StorageError
from fedemb.reports.mlflow.log import log
from fedemb.reports.mlflow.tracked import TrackedRun

RUN = TrackedRun(
    experiment="glyphs",
    name="monday",
    run_id="0" * 32,
    status="FINISHED",
    start=0,
    end=1,
    parameters={},
    metrics={},
    tags={},
    artifacts={},
)


@contextmanager
def answering(answer):
    """An HTTP server with the same JSON for every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


@pytest.mark.parametrize("answer", [{}, [], None, {"detail": "sign in"}, {"experiment": None}])
def test_answer_of_another_service_is_an_error_of_the_server(answer):
    with answering(answer) as url, pytest.raises(StorageError, match="did not take the run"):
        log(RUN, url)
