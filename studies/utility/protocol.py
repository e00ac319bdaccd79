"""Which alphabets play which part: fixed here, so that no result can choose its own judges.

Recipes are chosen on validation alphabets; test alphabets are drawn by a keyed permutation and read
by final rows only. The evaluation alphabets of earlier versions of the presets are the validation
alphabets here, since recipes were selected on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from fedemb.documents.artifacts import sha256_hex

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
      name: stands in every result; a new draw is a new name.
      column: the column that divides.
      public: pretrains.
      validation: chooses recipes; trains in the final stage.
      private: trains, but for the test values drawn from it.
      tests: how many values are drawn for the test.
    """

    name: str
    column: str
    public: tuple[str, ...]
    validation: tuple[str, ...]
    private: tuple[str, ...]
    tests: int

    @cached_property
    def test(self) -> tuple[str, ...]:
        """Values that final rows are evaluated on, and nothing before them."""
        keyed = sorted(self.private, key=lambda name: sha256_hex(f"{self.name}/{name}".encode()))
        return tuple(sorted(keyed[: self.tests]))

    def split(self, stage: Stage) -> Split:
        """Who trains and who is evaluated in a stage.

        `selection` evaluates on the validation values, `final` trains on them too and evaluates on
        the test values.
        """
        rest = tuple(name for name in self.private if name not in self.test)
        if stage == "selection":
            return Split(self.public, rest, self.validation)
        return Split(self.public, (*rest, *self.validation), self.test)


OMNIGLOT = Protocol(
    name="omniglot/1",
    column="alphabet",
    public=("Arcadian", "Early_Aramaic", "Sanskrit", "Latin", "Cyrillic"),
    validation=(
        "Burmese_(Myanmar)",
        "Syriac_(Estrangelo)",
        "N_Ko",
        "Anglo-Saxon_Futhorc",
        "Gujarati",
    ),
    private=(
        "Asomtavruli_(Georgian)",
        "Tagalog",
        "Hebrew",
        "Mkhedruli_(Georgian)",
        "Bengali",
        "Japanese_(hiragana)",
        "Ojibwe_(Canadian_Aboriginal_Syllabics)",
        "Armenian",
        "Tifinagh",
        "Braille",
        "Alphabet_of_the_Magi",
        "Japanese_(katakana)",
        "Futurama",
        "Korean",
        "Grantha",
        "Blackfoot_(Canadian_Aboriginal_Syllabics)",
        "Balinese",
        "Inuktitut_(Canadian_Aboriginal_Syllabics)",
        "Greek",
        "Malay_(Jawi_-_Arabic)",
    ),
    tests=8,
)
