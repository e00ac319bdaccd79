"""Fewer garbage collections while many lasting objects are made, and lighter imports."""

from __future__ import annotations

import gc
import sys
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
def light_import(*optional: str) -> Generator[None]:
    """Imports packages without collecting garbage, and without optional modules.

    The optional modules, which a package only tries to load, can be imported afterwards.
    """
    absent = set(optional) - sys.modules.keys()
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: not importable
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()  # later collections never walk what the imports made
    finally:
        for name in absent:
            sys.modules.pop(name, None)
        if enabled:
            gc.enable()
