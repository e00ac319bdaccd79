"""One change of one file, and the function that it changes."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType

from tests.mutation.groups import REPOSITORY

SEED = b"a sample of all files"
"""Of the order in which mutants are tried."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    operator: str
    occurrence: int
    line: int
    begin: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """Names the change as long as its file stays as it is."""
        digest = hashlib.sha256(_text(self.file).encode()).hexdigest()[:12]
        file = self.file.removeprefix("components/")
        return f"{file}@{digest}:{self.begin}:{self.operator}:{self.occurrence}"

    @property
    def turn(self) -> bytes:
        """Mutants are tried in this order: any first part is a random sample of all files."""
        return hashlib.sha256(SEED + self.key.encode()).digest()

    @property
    def path(self) -> str:
        """The file that is changed."""
        return str(REPOSITORY / self.file)

    def source(self) -> str:
        """The file with the change.

        Raises:
          ValueError: the file is not the one that the mutants were listed from.
        """
        text = _text(self.file)
        end = self.begin + len(self.old)
        if text[self.begin : end] != self.old:
            raise ValueError(f"{self.file} changed since the mutants were listed; list them again")
        return text[: self.begin] + self.new + text[end:]


@functools.cache
def _text(file: str) -> str:
    return (REPOSITORY / file).read_text()


class Changed:
    """The function that a mutant changes, found in both versions of its file."""

    def __init__(self, mutant: Mutant):
        """Compiles both versions; where code outside of functions changed, `old` stays None."""
        self.path = mutant.path
        before = compile(_text(mutant.file), self.path, "exec", dont_inherit=True)
        after = compile(mutant.source(), self.path, "exec", dont_inherit=True)
        self.old: CodeType | None = None
        self.new: CodeType | None = None
        found = _changed(before, after)
        if found is not None and found[0].co_flags & 0x2:
            self.old, self.new = found

    def living(self, functions: Mapping[tuple[str, str], list[FunctionType]]) -> list[FunctionType]:
        """The living functions of the code, from those of the product: wrapped ones too."""
        old = self.old
        if old is None:
            return []
        return [
            item
            for item in functions.get((os.path.realpath(self.path), old.co_qualname), [])
            if abs(item.__code__.co_firstlineno - old.co_firstlineno) < 3
            and item.__code__.co_freevars == old.co_freevars
        ]

    def put_in_place(self, functions: Mapping[tuple[str, str], list[FunctionType]]) -> bool:
        """Replaces the code of the function; False where no living function has it."""
        living = self.living(functions)
        for function in living:
            assert self.new is not None
            function.__code__ = self.new
        return bool(living)


def _changed(before: CodeType, after: CodeType) -> tuple[CodeType, CodeType] | None:
    """The outermost function whose code differs; the module where more than functions differ."""
    olds = [const for const in before.co_consts if isinstance(const, CodeType)]
    news = [const for const in after.co_consts if isinstance(const, CodeType)]
    same = (
        len(olds) == len(news)
        and before.co_code == after.co_code
        and before.co_names == after.co_names
        and [const for const in before.co_consts if not isinstance(const, CodeType)]
        == [const for const in after.co_consts if not isinstance(const, CodeType)]
    )
    if not same:
        return before, after
    for old, new in zip(olds, news, strict=True):
        if old != new:
            found = _changed(old, new)
            if found is None:
                continue
            # A function inside a function changes with the outer one.
            return (before, after) if before.co_flags & 0x2 else found
    return None
