"""A TCP relay that misbehaves on purpose: cuts after so many bytes, or answers slowly."""

import contextlib
import socket
import threading
import time


class CuttingProxy:
    """Relays to a loopback port; each connection is cut once `upload_limit` bytes went up.

    `healthy_after` connections have been cut, later ones pass. `swallow_answers` connections are
    let through upwards, and cut when the answer comes: the server did it, the client cannot know.
    """

    def __init__(
        self,
        target: int,
        *,
        upload_limit: int | None = None,
        healthy_after: int | None = None,
        swallow_answers: int = 0,
        delay: float = 0.0,
    ) -> None:
        self.target, self.upload_limit, self.delay = target, upload_limit, delay
        self.healthy_after, self.swallow_answers = healthy_after, swallow_answers
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "CuttingProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self.target))
        threading.Thread(target=self._up, args=(client, server), daemon=True).start()
        self._down(server, client)

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        healthy = self.healthy_after is not None and self.cuts >= self.healthy_after
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                sent += len(data)
                if self.upload_limit is not None and sent > self.upload_limit and not healthy:
                    self._cut(client, server)
                    return
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                # "100 Continue" is not an answer yet; a busy machine reads both at once.
                interim = b" 100 Continue" in data[:64]
                answer = data.partition(b"\r\n\r\n")[2] if interim else data
                if self.swallow_answers > self.cuts and answer:
                    self._cut(client, server)
                    return
                time.sleep(self.delay)
                client.sendall(data)
        self._close(client, server)

    def _cut(self, *sockets: socket.socket) -> None:
        self.cuts += 1
        self._close(*sockets)

    @staticmethod
    def _close(*sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
