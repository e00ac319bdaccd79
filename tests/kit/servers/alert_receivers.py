"""Receivers of alerts on this machine: HTTP, and SMTP with STARTTLS and AUTH."""

from __future__ import annotations

import base64
import datetime
import json
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_string
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Webhook:
    """An HTTP server that keeps what was posted.

    Args:
      status: status of every answer; 302 redirects to `/elsewhere` of the same server.
      delay: seconds before each answer.
    """

    def __init__(self, status: int = 200, delay: float = 0.0):
        self.posts: list[tuple[str, dict[str, str], dict]] = []
        """Path, headers in lower case, and JSON body."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.posts.append((self.path, headers, json.loads(body)))
                time.sleep(delay)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self):
                receiver.posts.append((self.path, {}, {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/token-s3cret"

    def __enter__(self) -> Webhook:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Writes a certificate of `localhost`, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "mail.pem", folder / "mail.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


class Mailbox:
    """What an SMTP server received."""

    def __init__(self, port: int):
        self.port = port
        self.messages: list[tuple[str, list[str], Message, bool]] = []
        """Sender, recipients, message, and whether the connection was encrypted."""
        self.lines: list[str] = []
        """Every line in plain text."""
        self.logins: list[str] = []


@contextmanager
def smtp_server(tls: tuple[Path, Path] | None = None) -> Iterator[Mailbox]:
    """Runs an SMTP server; with a certificate it offers STARTTLS, and AUTH once encrypted."""
    context = None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*tls)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.stream, self.encrypted = self.request.makefile("rb"), False
            self.sender, self.recipients = "", []
            self.say("220 localhost")
            while raw := self.stream.readline():
                line = raw.decode().rstrip("\r\n")
                if not self.encrypted:
                    box.lines.append(line)
                if not self.answer(line):
                    return

        def say(self, text):
            self.request.sendall(f"{text}\r\n".encode())

        def answer(self, line):
            verb = line.split(" ")[0].upper()
            if verb == "EHLO":
                offers = ["STARTTLS"] if context and not self.encrypted else []
                offers += ["AUTH PLAIN"] if self.encrypted else []
                rows = ["localhost", *offers]
                for row in rows[:-1]:
                    self.say(f"250-{row}")
                self.say(f"250 {rows[-1]}")
            elif verb == "STARTTLS" and context:
                self.say("220 go ahead")
                self.request = context.wrap_socket(self.request, server_side=True)
                self.stream, self.encrypted = self.request.makefile("rb"), True
            elif verb == "AUTH":
                box.logins.append(base64.b64decode(line.split(" ")[2]).decode())
                self.say("235 accepted")
            elif verb == "MAIL":
                self.sender = line.partition(":")[2].split(" ")[0].strip("<>")
                self.say("250 ok")
            elif verb == "RCPT":
                self.recipients.append(line.partition(":")[2].strip("<>"))
                self.say("250 ok")
            elif verb == "DATA":
                self.say("354 end with a dot")
                rows = []
                while (row := self.stream.readline().decode()) not in (".\r\n", ""):
                    rows.append(row)
                message = message_from_string("".join(rows))
                box.messages.append((self.sender, self.recipients, message, self.encrypted))
                self.say("250 ok")
            else:
                self.say("221 bye" if verb == "QUIT" else "502 unknown")
                return verb != "QUIT"
            return True

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        box = Mailbox(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield box
        finally:
            server.shutdown()
