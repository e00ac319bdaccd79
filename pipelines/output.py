"""Everything the command line prints. Text of others is shown and never obeyed.

Names of files, users and runs come from files that anybody may have written. A control character
could move the cursor, hide the lines above or turn the reading direction, and a line break could
add a line that says "verified". So each argument of `say` is one line, and all characters that a
reader does not see are printed as escapes.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping

import typer

from fedemb.foundation.addresses import redacted
from fedemb.foundation.canonical_json import ToJson

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control, format (direction, zero width), surrogates, line separators."""


def escaped(text: object) -> str:
    r"""Returns text on one line whose characters are all visible, without credentials.

    >>> escaped("a\rb\n\x1b[2J\u202e")
    'a\\rb\\n\\x1b[2J\\u202e'
    """
    shown = redacted(str(text))
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _UNSEEN
        else character
        for character in shown
    )


def say(*lines: object, err: bool = False) -> None:
    """Prints each argument as one line.

    Args:
      *lines: text; what has several lines is given as several arguments.
      err: to the standard error.
    """
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        shown = escaped(line).encode(encoding, "backslashreplace").decode(encoding)
        typer.echo(shown, err=err)


def say_block(text: str, *, err: bool = False) -> None:
    """Prints text of several lines that our code made, such as YAML; each line is escaped."""
    say(*text.removesuffix("\n").split("\n"), err=err)


def say_json(
    value: ToJson | Mapping[str, object], indent: int | None = 1, *, sort_keys: bool = False
) -> None:
    """Prints a value as JSON in ASCII, which escapes by itself."""
    say_block(json.dumps(value, indent=indent, sort_keys=sort_keys))
