"""A real receiver of OpenLineage events over HTTP."""

import pytest

from tests.kit.servers.receiver import Receiver


@pytest.fixture
def receiving(monkeypatch):
    """Starts a receiver and names it in the environment."""
    started = []

    def start():
        started.append(Receiver())
        monkeypatch.setenv("OPENLINEAGE_URL", started[-1].url)
        return started[-1]

    yield start
    for receiver in started:
        receiver.close()
