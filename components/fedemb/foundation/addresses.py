"""Addresses of stores and web services: the one place that parses them.

An address with a user, a password or a port is refused, as it would stand in every copy of a
configuration, and so is one with a signed query. No message repeats such an address, and
`redacted` takes the secret out of text that does.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from fedemb.errors import InputError

WITHOUT = "give scheme://bucket/prefix, and the credentials to the environment"
_SECRET = re.compile(
    r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*:/{1,2})[^/\s@'\"]*@"
    r"|(?P<name>\b(?:X-Amz-[A-Za-z-]+|X-Goog-[A-Za-z-]+|Signature|sig|AWSAccessKeyId|password|token)"
    r"=)[^&\s'\"]+"
)


def split_address(uri: str) -> SplitResult:
    """Parses `scheme://place/path` that holds no credentials; a path has no scheme.

    Raises:
      InputError: it holds a user, a password, a port or a query, or cannot be parsed.
    """
    problem = credentials_in(uri)
    scheme = uri.partition("://")[0]
    if problem:
        raise InputError(f"an address {redacted(scheme)}://... {problem}; {WITHOUT}")
    try:
        return urlsplit(uri, allow_fragments=False)
    except ValueError as error:  # a bracket that is not closed
        raise InputError(f"an address {scheme}://... cannot be parsed; {WITHOUT}") from error


def credentials_in(uri: str) -> str:
    """What is wrong with an address of a store that may hold a secret; empty: nothing.

    Only text with `://` is an address; `file:` and paths have no place for credentials.
    """
    if "://" not in uri or uri.startswith("file:"):
        return ""
    place = uri.partition("://")[2].partition("/")[0]
    if "@" in place or ":" in place:
        return "holds a user, a password or a port"
    if redacted(uri) != uri:
        return "holds a signature or a password in its query"
    return ""


def redacted(text: str) -> str:
    """Text whose addresses have lost their users, passwords and signatures.

    >>> redacted("no store at s3://KEY:SECRET@bucket/x")
    'no store at s3://***@bucket/x'
    """
    return _SECRET.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    return f"{found['scheme']}***@" if found["scheme"] else f"{found['name']}***"
