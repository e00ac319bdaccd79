"""A real receiver of OpenLineage events over HTTP."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Receiver:
    """An HTTP server that keeps what it is sent, and answers as told."""

    def __init__(self, status: int = 201, drip: float = 0.0):
        received = self.received = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append((self.path, dict(self.headers), body))
                self.send_response(status)
                self.send_header("Content-Length", "50" if drip else "0")
                self.end_headers()
                for _ in range(50 if drip else 0):
                    time.sleep(drip)
                    self.wfile.write(b" ")
                    self.wfile.flush()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def events(self):
        return [json.loads(body) for _, _, body in self.received]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiving(monkeypatch):
    """Starts a receiver and names it in the environment."""
    started = []

    def start(**behaviour):
        receiver = Receiver(**behaviour)
        started.append(receiver)
        monkeypatch.setenv("OPENLINEAGE_URL", receiver.url)
        return receiver

    yield start
    for receiver in started:
        receiver.close()
