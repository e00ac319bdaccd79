"""Fewer garbage collections while many lasting objects are made."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_OBJECTS = 100_000
"""Objects that are made between two collections; Python's default is 700."""


@contextmanager
def few_collections() -> Generator[None]:
    """Collects garbage rarely: walking thousands of lasting objects again and again finds none."""
    before = gc.get_threshold()
    gc.set_threshold(max(_OBJECTS, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def no_collections() -> Generator[None]:
    """Collects no garbage during imports, and later never walks what they made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()
