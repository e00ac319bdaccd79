"""HTML pages, self-contained, and Markdown: rendered from templates.

A page works without a network, in light and dark mode, on paper and on a phone. Templates are in
`templates/`, extend `base.html` (blocks `title`, `kicker`, `verdict`, `body`, `footer`) and build
their parts with the macros of `macros.html`, available to every template as `ui`. This module reads
no clock and draws no random number: the same context gives the same bytes.
"""

from __future__ import annotations

import html
import math
import re
from base64 import b64encode
from datetime import datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup, escape

from fedemb.documents.fields import Interval
from fedemb.errors import ArtifactError


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


TEMPLATES = Path(__file__).parent / "templates"
BACK_LINK = "<!-- way back -->"
"""Placeholder of the link from a report page to the page of its run."""
_CONTENTS_FROM = 4
"""Minimum number of sections for a table of contents."""


def link(text: str, address: str) -> Markup:
    """Returns text as a link to a file beside the page, or to a Google Cloud Storage folder.

    A browser cannot open addresses of other stores; these stay text.
    """
    scheme, separator, rest = address.partition("://")
    if scheme == "gs" and separator:
        href = f"https://console.cloud.google.com/storage/browser/{quote(rest)}"
    elif separator:
        return escape(text)
    else:
        href = quote(address)
    return Markup('<a href="{}">{}</a>').format(href, text)


def tone_of(gain: Interval | None) -> str:
    """Returns the colour of a page of figures: by a significant gain or loss."""
    if gain is None:
        return "plain"
    return "good" if gain.low > 0 else "bad" if gain.high < 0 else "plain"


def with_contents(body: str) -> Markup:
    """Adds anchors to the sections of a page and, if there are several, a table of contents."""
    titles: list[tuple[str, str]] = []

    def anchored(found: re.Match[str]) -> str:
        anchor = re.sub(r"\W+", "-", found[1].lower()).strip("-")
        titles.append((anchor, found[1]))
        return f'<h2 id="{anchor}">{found[1]}</h2>'

    body = re.sub(r"<h2>(.*?)</h2>", anchored, body)
    if len(titles) < _CONTENTS_FROM:
        return Markup(body)
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in titles)
    return Markup(f'<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>\n{body}')


def unbroken(page: str) -> str:
    """Keeps numbers such as 1e-05, and intervals, on one line; skips `commands`."""

    def keep(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith("<"):
            return text
        numbers = r"\d[\d.]*e-?\d+|\d[\d.]* (?:%|s\b)|\[[-+\d.]+, [-+\d.]+\]"
        text = re.sub(numbers, r'<span class="number">\g<0></span>', text)
        return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", text)

    whole = "<(svg|style|script|title|pre|code)\\b.*?</\\1>|<[^>]*>|[^<]+"
    return re.sub(whole, keep, page, flags=re.DOTALL)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: not (name or "").endswith(".j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "sig": significant,
        "percent": percent,
        "seconds": seconds,
        "date": date,
        "with_contents": with_contents,
        "link_to": link,
        "signer": signer_name,
        "plain": plain,
        "as_text": as_text,
        "source": lambda script: "sha256-" + b64encode(sha256(script.encode()).digest()).decode(),
    }
    environment.globals["ui"] = environment.get_template("macros.html").module
    return environment


def render(template: str | Path, **context: object) -> str:
    """Renders a template to one self-contained page, or to Markdown.

    Args:
      template: file name in `templates/`, e.g. `utility_report.html`, or a path elsewhere.
      **context: values of the template; a missing name is an error.

    Raises:
      ArtifactError: the template is missing, broken, or uses a value that is not in `context`.
    """
    try:
        known = _environment()
        if isinstance(template, Path):
            page = known.from_string(template.read_text(encoding="utf-8"))
        else:
            page = known.get_template(template)
        text = page.render(**context)
        return text if str(template).endswith(".j2") else unbroken(text)
    except TemplateError as error:
        raise ArtifactError(
            f"the page {template} cannot be drawn: {error.message}; pass what the template names"
        ) from error
