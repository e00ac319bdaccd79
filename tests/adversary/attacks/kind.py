"""What an attack is, and what attacks have in common."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fedemb.errors import FedEmbError
from fedemb.ledger import rotate_keys
from tests.kit.pipeline_runs import honest_run


class Attack(NamedTuple):
    """One attack that was drawn."""

    text: str
    """Names it: two attacks of a kind with the same text are the same attack."""
    act: Callable[[], str]
    """Carries it out; returns what the attacker achieved, empty if nothing."""


class Kind(NamedTuple):
    """A kind of attack."""

    name: str
    draw: Callable[[World, random.Random], Attack]
    most: int
    """Number of attacks of this kind in one run of 300."""


@dataclass
class World:
    """What is attacked: made once, copied for each attack that changes it."""

    root: Path

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def fresh(self) -> Path:
        """A new folder."""
        folder = self.root / f"attack-{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder

    @cached_property
    def allowed(self) -> honest_run.HonestRun:
        """A run that the gate allows, in a policy whose first signing keys are retired."""
        first = honest_run.start(self.root / "first", "sunday", self.root / "allowed" / "policy")
        first.do("plan reserve")
        rotate_keys(first.ledger_uri, first.keys, "a year is over")
        run = honest_run.start(self.root / "allowed").until_gate()
        assert run.do_gate()["allow"] is True
        return run

    @cached_property
    def released(self) -> honest_run.HonestRun:
        """The same, released."""
        run = honest_run.copy_of(self.allowed, self.root / "released")
        run.do_release()
        assert run.problems() == []
        return run

    @contextmanager
    def bundle(self) -> Iterator[tuple[Path, Path]]:
        """A copy of the released bundle, and the keys that its reader pinned."""
        folder = self.fresh()
        shutil.copytree(self.released.bundle, folder / "bundle")
        try:
            yield folder / "bundle", self.released.trust
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def run(self) -> Iterator[honest_run.HonestRun]:
        """A copy of the allowed run."""
        folder = self.fresh()
        try:
            yield honest_run.copy_of(self.allowed, folder / "run")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def attempted(
    act: Callable[[], object], achieved: str = "it was accepted", *, lines: int = 1
) -> str:
    """Carries out what must be refused.

    Returns:
      Empty if the product refused it with a short error of its own; else what was achieved.
    """
    try:
        act()
    except FedEmbError as error:
        text = str(error)
        short = text.count("\n") < lines and len(text) < 2000
        return "" if short else f"an error of {len(text)} characters"
    except (Exception, RecursionError) as error:
        return f"{type(error).__name__} instead of a refusal: {error}"
    return achieved


def damaged(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Bytes with one change, and its name; never the same bytes."""
    place = draw.randrange(max(1, len(data)))
    ways = {
        f"bit {draw.randrange(8)} of byte {place}": data[:place]
        + bytes([data[place] ^ 1 << draw.randrange(8)] if data else b"\x01")
        + data[place + 1 :],
        f"cut at {place}": data[:place],
        f"byte {place} left out": data[:place] + data[place + 1 :],
        f"bytes put in at {place}": data[:place] + os.urandom(3) + data[place:],
        f"zeros from {place}": data[:place] + bytes(len(data) - place),
        "newline at the end": data + b"\n",
        "twice": data + data,
        "empty": b"",
    }
    different = {name: new for name, new in ways.items() if new != data}
    name = draw.choice(sorted(different))
    return name, different[name]
