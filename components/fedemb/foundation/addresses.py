"""Addresses of stores and servers, and time limits for their answers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from fedemb.errors import InputError

WITHOUT = "Use scheme://bucket/prefix and pass credentials in the environment."
_USER = r"(?:(?<=[/\\])[^/\s@'\"]*|[^/:\s@'\"][^:\s@'\"]*:[^\s@'\"]*)@"
_NAMES = r"\b(?:X-Amz-[a-z-]+|X-Goog-[a-z-]+|Signature|sig|AWSAccessKeyId|password|token)="
_IN_QUERY = r"[?&;][\w.-]*(?:key|token|secret|passw|pwd|sig|auth)[\w.-]*="
_SECRET = re.compile(
    rf"(?P<scheme>[a-z][a-z0-9+.-]*:[/\\]{{0,2}}){_USER}|(?P<name>{_NAMES}|{_IN_QUERY})[^&\s'\"]+",
    re.IGNORECASE,
)


def split_address(uri: str) -> SplitResult:
    """Parses `scheme://place/path` without credentials; a path has no scheme.

    Raises:
      InputError: the address has a user, a password, a port or a query, or cannot be parsed.
    """
    problem = credentials_in(uri)
    scheme = uri.partition("://")[0]
    if problem:
        raise InputError(f"Address {redacted(scheme)}://... {problem}. {WITHOUT}")
    try:
        return urlsplit(uri, allow_fragments=False)
    except ValueError as error:  # an unclosed bracket
        raise InputError(f"Address {scheme}://... is not a valid URI. {WITHOUT}") from error


def credentials_in(uri: str) -> str:
    """Returns the problem of a store address that may contain a secret; empty: no problem.

    Only text with `://` is an address; `file:` addresses and paths cannot contain credentials.
    """
    if "://" not in uri or uri.startswith("file:"):
        return ""
    place = uri.partition("://")[2].partition("/")[0]
    if "@" in place or ":" in place:
        return "contains a user, a password or a port"
    if redacted(uri) != uri:  # a key or a password may hold a slash, too
        return "contains a signature or a password in its query"
    return ""


def redacted(text: str) -> str:
    """Returns the text with users, passwords and signatures removed from its addresses.

    >>> redacted("no store at s3://KEY:SECRET@bucket/x")
    'no store at s3://***@bucket/x'
    """
    return _SECRET.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    return f"{found['scheme']}***@" if found["scheme"] else f"{found['name']}***"


def nested(first: str, second: str) -> bool:
    """Returns whether one of two stores, paths or URIs, is the other or lies inside it."""
    one, other = (
        f"{place if '://' in place else Path(place).expanduser().resolve().as_uri()}".rstrip("/")
        for place in (first, second)
    )
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def in_time(work: Callable[[], str | None], seconds: float = 60.0) -> str:
    """Returns the problem that `work` returns or raises, or that it took too long; empty: none.

    The work runs in a thread that cannot keep the process alive.
    """
    found = [f"it did not answer within {seconds:g} seconds"]

    def run() -> None:
        try:
            found.append(work() or "")
        except Exception as error:  # nothing that others answer may fail a run
            found.append(str(error)[:800] or type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return "no thread can be started"
    thread.join(seconds)
    return found[-1]
