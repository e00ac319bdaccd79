"""Groups the commands in `fedemb --help` by what people do with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from typer.core import TyperGroup
from typing_extensions import override

SECTIONS: dict[str, tuple[str, ...]] = {
    "Prepare": ("init", "check-data", "make-data", "backbone", "config"),
    "Plan and run": ("plan", "run", "runs", "ledger"),
    "Review and release": ("approve", "verify", "lineage", "register"),
    "Use a model": ("embed",),
    "Operate": ("compile", "submit", "schedule", "doctor"),
}
"""Title -> commands, in the order of the help. A test compares them with the commands."""


class Formatter(Protocol):
    """Formatter of help texts; its own type is private to Typer."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Indents what is written inside below a title."""
        ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Writes terms and their descriptions."""
        ...


class SectionedGroup(TyperGroup):
    """Group of commands whose help lists them by section."""

    @override
    def format_commands(self, ctx: object, formatter: Formatter) -> None:
        """Writes one list of commands for each section."""
        width = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(limit=100))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)
