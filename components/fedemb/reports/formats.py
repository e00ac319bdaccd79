"""Numbers, times and names as text for readers."""

from __future__ import annotations

import html
import math
import re
from datetime import datetime

from fedemb.documents.fields import Interval


def significant(value: float | None, digits: int = 3) -> str:
    """Formats a number for reading: `digits` significant digits, thousands kept whole.

    >>> significant(0.0012345), significant(3.14159), significant(32000), significant(1e-6)
    ('0.00123', '3.14', '32,000', '1e-06')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text.replace("e+0", "e").replace("e+", "e")


def percent(value: float | None, digits: int = 1) -> str:
    """Formats a share: `0.123` becomes `12.3 %`."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Formats a duration: `0.21` becomes `0.2 s`, `75` becomes `1 min 15 s`."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def date(value: str) -> str:
    """Formats a time: `2026-11-22T03:17:39+00:00` becomes `22 November 2026, 03:17 UTC`."""
    return f"{datetime.fromisoformat(value):%-d %B %Y, %H:%M} UTC"


def figure(found: Interval | None) -> str:
    """Formats a share with its interval: `0.412 [0.398, 0.427]`."""
    return "-" if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def plain(text: str) -> str:
    """Escapes a text for a line or a table cell of Markdown: without markup or line breaks."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return line.replace("[", "\\[").replace("|", "\\|")


def as_text(words: str) -> str:
    """Escapes external text for Markdown: on one line, without markup, HTML or links."""
    shown = "".join(c if c.isprintable() else " " for c in words)
    return re.sub(r"([\\`*_\[\]#|~!])", r"\\\1", html.escape(" ".join(shown.split()), quote=False))


def signer_name(actor: str) -> str:
    """Returns the name of who signed a record of the policy owner; without one, the role."""
    return "the policy owner" if actor in ("", "unnamed") else actor
