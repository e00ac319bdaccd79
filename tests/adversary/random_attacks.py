"""Attacks drawn at random, night after night; exit code 1 if any succeeds.

    python -m tests.adversary.random_attacks [--attacks 300] [--seed N] [--kind NAME]

Every kind of `tests/adversary/attacks` draws attacks until the run has so many different ones. The
seed is printed, so that a night can be repeated.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.adversary.attacks import KINDS, Attack, Kind, World

TRIES = 50
"""Draws for one attack that was not drawn before."""


def distinct(kind: Kind, world: World, draw: random.Random, count: int) -> list[Attack]:
    """So many different attacks of a kind, fewer where it has no more."""
    found: dict[str, Attack] = {}
    for _ in range(TRIES * count):
        if len(found) == count:
            break
        attack = kind.draw(world, draw)
        found.setdefault(attack.text, attack)
    return list(found.values())


def attack_all(
    world: World, seed: int, attacks: int, kinds: Sequence[Kind] = KINDS
) -> tuple[Counter[str], list[str]]:
    """Carries out attacks of each kind, in proportion to `Kind.most`.

    Returns:
      Attacks by kind, and a sentence for each that succeeded.
    """
    total = sum(kind.most for kind in kinds)
    tried: Counter[str] = Counter()
    succeeded = []
    for kind in kinds:
        draw = random.Random(f"{seed} {kind.name}")
        for attack in distinct(kind, world, draw, -(-attacks * kind.most // total)):
            tried[kind.name] += 1
            if achieved := attack.act():
                succeeded.append(f"{kind.name}: {attack.text}: {achieved}")
    return tried, succeeded


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attacks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS])
    asked = parser.parse_args()
    kinds = [kind for kind in KINDS if asked.kind in (None, kind.name)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedemb-attacks-") as folder:
        tried, succeeded = attack_all(World(Path(folder)), asked.seed, asked.attacks, kinds)
    for name, count in tried.items():
        sys.stdout.write(f"{count:5} {name}\n")
    for text in succeeded:
        sys.stdout.write(f"SUCCEEDED {text!r}\n")
    sys.stdout.write(
        f"{tried.total()} different attacks in {time.monotonic() - started:.0f} s, seed "
        f"{asked.seed}: {len(succeeded)} succeeded\n"
    )
    return int(bool(succeeded) or (asked.kind is None and tried.total() < asked.attacks))


if __name__ == "__main__":
    sys.exit(main())
