"""Handles SIGTERM and Ctrl-C: the trainer stops after the current round."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from fedemb.foundation import step_logging as events

_LOG = logging.getLogger(__name__)


class StopRequest:
    """While entered, records the signals instead of exiting; a second Ctrl-C kills the process.

    Outside the main thread, signals cannot be recorded and keep their default behavior.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {
                number: signal.signal(number, self._note)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        _LOG.info(events.STOPPING)
