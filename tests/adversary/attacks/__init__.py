"""Kinds of attacks: each draws one attack at random and carries it out.

An attack succeeds if the product accepts what it must refuse, ends in anything but one of its own
errors, or leaves the effect that the attacker wanted.
"""

from tests.adversary.attacks import evidence, inputs, runs
from tests.adversary.attacks.kind import Attack, Kind, World, attempted

KINDS: tuple[Kind, ...] = (*inputs.KINDS, *evidence.KINDS, *runs.KINDS)

__all__ = ["KINDS", "Attack", "Kind", "World", "attempted"]
