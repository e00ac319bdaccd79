"""Ports for servers of tests."""

import socket


def free_port() -> int:
    """A loopback port that no one listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
