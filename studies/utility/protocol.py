"""Division of the alphabets into training, validation and test, fixed before any result.

Recipes are chosen on validation alphabets. Test alphabets are drawn by a keyed permutation of those
that no earlier study evaluated on, and read by final rows only, which run when every contest is
decided (`contests.py`). Alphabets of earlier evaluations only train.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fedemb.foundation.canonical_json import sha256_hex

Stage = Literal["selection", "final"]


class Split(NamedTuple):
    """Names of the values (alphabets) of each part."""

    public: tuple[str, ...]
    train: tuple[str, ...]
    evaluation: tuple[str, ...]


@dataclass(frozen=True)
class Protocol:
    """A division of the values of one public column.

    Attributes:
      name: part of every result; a new draw needs a new name.
      column: the column that divides.
      public: pretrains.
      validation: chooses recipes; trains in the final stage.
      judged: trains; earlier studies evaluated on it, so it cannot be a test.
      unread: trains, but for the test values drawn from it.
      tests: how many values are drawn for the test.
    """

    name: str
    column: str
    public: tuple[str, ...]
    validation: tuple[str, ...]
    judged: tuple[str, ...]
    unread: tuple[str, ...]
    tests: int

    @cached_property
    def test(self) -> tuple[str, ...]:
        """Values that final rows are evaluated on, and nothing before them."""
        keyed = sorted(self.unread, key=lambda name: sha256_hex(f"{self.name}/{name}".encode()))
        return tuple(sorted(keyed[: self.tests]))

    def split(self, stage: Stage) -> Split:
        """Returns the values that train and those that are evaluated in a stage.

        `selection` evaluates on the validation values, `final` trains on them too and evaluates on
        the test values.
        """
        rest = (*self.judged, *(name for name in self.unread if name not in self.test))
        if stage == "selection":
            return Split(self.public, rest, self.validation)
        return Split(self.public, (*rest, *self.validation), self.test)


OMNIGLOT = Protocol(
    name="omniglot/2",
    column="alphabet",
    public=("Arcadian", "Early_Aramaic", "Sanskrit", "Latin", "Cyrillic"),
    validation=(
        "Burmese_(Myanmar)",
        "Syriac_(Estrangelo)",
        "N_Ko",
        "Anglo-Saxon_Futhorc",
        "Gujarati",
    ),
    judged=(
        "Bengali",
        "Blackfoot_(Canadian_Aboriginal_Syllabics)",
        "Futurama",
        "Hebrew",
        "Inuktitut_(Canadian_Aboriginal_Syllabics)",
        "Mkhedruli_(Georgian)",
        "Ojibwe_(Canadian_Aboriginal_Syllabics)",
        "Tagalog",
    ),
    unread=(
        "Asomtavruli_(Georgian)",
        "Japanese_(hiragana)",
        "Armenian",
        "Tifinagh",
        "Braille",
        "Alphabet_of_the_Magi",
        "Japanese_(katakana)",
        "Korean",
        "Grantha",
        "Balinese",
        "Greek",
        "Malay_(Jawi_-_Arabic)",
    ),
    tests=6,
)
