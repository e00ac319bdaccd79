"""Text for the privacy unit; every page, document and sentence that names it uses this module.

A guarantee for one image promises a person less than one for a user, so every text must name the
unit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal["user", "image"]
"""Privacy unit of a guarantee: a user with all of their data, or one image."""


def count_of(number: int, noun: str) -> str:
    """Returns a number with its noun.

    >>> count_of(1, "round"), count_of(2000, "round")
    ('1 round', '2,000 rounds')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class UnitWords(NamedTuple):
    """Text fragments for a privacy unit."""

    one: str
    """A unit, as in "one user more"."""
    many: str
    whole: str
    """The subject of the guarantee."""
    reach: str
    """The scope of the protection of each unit, after a comma."""
    change: str
    """The change of a unit that stays in the data, after "one user that"."""
    covered: str
    """Covered and uncovered data, in sentences."""


UNITS: dict[Unit, UnitWords] = {
    "user": UnitWords(
        one="user",
        many="users",
        whole="one user with everything they own",
        reach="for everything they own",
        change="changes all of their own data",
        covered="All images under one user id are covered together: epsilon does not grow with "
        "the number of images. A person with two user ids counts as two users, and images of a "
        "person in another account are not covered.",
    ),
    "image": UnitWords(
        one="image",
        many="images",
        whole="one image",
        reach="each by itself",
        change="becomes another image",
        covered="Single images are covered, each separately. A person with several is protected "
        "less: k images multiply epsilon by about k. No guarantee covers a person with all of "
        "their images.",
    ),
}
