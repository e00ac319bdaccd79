"""The unit of privacy in words: every page, document and sentence that names it takes them here.

A guarantee for one image promises a person less than one for a user; no text may leave open which.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal["user", "image"]
"""Whose presence a guarantee hides: a user with everything they own, or one image."""


def count_of(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count_of(1, "round"), count_of(2000, "round")
    ('1 round', '2,000 rounds')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class UnitWords(NamedTuple):
    """What a reader sees of a unit."""

    one: str
    """A unit, as in "one user more"."""
    many: str
    whole: str
    """What the guarantee is for."""
    reach: str
    """How far the protection of each unit goes, after a comma."""
    change: str
    """What a unit does that stays and is another afterwards, after "one user that"."""
    covered: str
    """What is covered and what is not, in sentences."""


UNITS: dict[Unit, UnitWords] = {
    "user": UnitWords(
        one="user",
        many="users",
        whole="one user with everything they own",
        reach="for everything they own",
        change="changes all of their own data",
        covered="All images under one user id are covered together, however many: the guarantee "
        "does not multiply by images. A person who appears under two user ids, or in other "
        "people's images, is not covered as one.",
    ),
    "image": UnitWords(
        one="image",
        many="images",
        whole="one image",
        reach="each by itself",
        change="becomes another image",
        covered="Single images are covered, each by itself. Whoever owns several is protected "
        "less: k images multiply epsilon by about k. Nothing is promised for a person with "
        "everything they own.",
    ),
}
