"""Requests to services outside fedemb: JSON and files, without redirects and with a time limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

SECONDS = 30
"""Time limit of one request. Slow answers can exceed it, so callers limit the whole exchange."""


def call_json(
    url: str,
    headers: Mapping[str, str],
    body: object = None,
    known: str = "",
    *,
    answers: bool = True,
) -> Any:
    """Sends a GET, or a POST of JSON.

    Args:
      url: URL with its query.
      headers: headers in addition to the content type.
      body: content to post; None sends a GET.
      known: HTTP status or `error_code` that means: not found.
      answers: whether a JSON response is expected.

    Returns: The response; None for the `known` error, or if no response is expected.

    Raises:
      OSError: no connection, or another error.
      ValueError: the response is not JSON.
    """
    data = None if body is None else json.dumps(body, sort_keys=True).encode()
    request = Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with _OPENER.open(request, timeout=SECONDS) as answer:
            return json.loads(answer.read(MOST)) if answers else None
    except HTTPError as error:
        if place := error.headers.get("Location"):
            raise OSError(f"it sends on to {place}; if you trust that address, name it") from error
        text = error.read(MOST).decode(errors="replace")
        if known and (known == str(error.code) or f'"{known}"' in text):
            return None
        raise OSError(f"HTTP {error.code}: {text[:200]}") from error


def put_bytes(url: str, headers: Mapping[str, str], data: bytes) -> None:
    """Sends a PUT with a file.

    Raises:
      OSError: no connection, or an error of the server.
    """
    kind = {"Content-Type": "application/octet-stream"}
    request = Request(url, data, {**kind, **headers}, method="PUT")
    try:
        with _OPENER.open(request, timeout=SECONDS):
            pass
    except HTTPError as error:
        text = error.read(MOST).decode(errors="replace")
        raise OSError(f"HTTP {error.code}: {text[:200]}") from error


class _Stay(HTTPRedirectHandler):
    """Rejects redirects, because the token in the headers would be sent along."""

    def http_error_302(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any) -> None:
        return None  # so the redirect status is handled as an error

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


_OPENER = build_opener(_Stay)
MOST = 10_000_000
"""Maximum bytes read of a response."""
