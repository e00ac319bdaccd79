"""An HTTP server that keeps what it is sent, and answers as told."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver(ThreadingHTTPServer):
    """Runs until `close`; `sent`: path, headers and body of each request; `methods`: their own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.sent, self.sends_on_to = 201, [], None
        self.methods, self.refused, self.answer = [], {}, b""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def events(self) -> list:
        """The bodies as JSON."""
        return [json.loads(body) for _, _, body in self.sent]

    def close(self) -> None:
        """Stops it."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.sent.append((self.path, dict(self.headers), body))
        self.server.methods.append(self.command)
        self.send_response(self.server.refused.get(self.command, self.server.status))
        if self.server.sends_on_to:
            self.send_header("Location", self.server.sends_on_to)
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST

    def log_message(self, *_: object) -> None:
        pass
