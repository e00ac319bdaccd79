"""Requests to services outside fedemb: JSON and files, without redirects and with a time limit."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import cast
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from typing_extensions import override

from fedemb.foundation.canonical_json import Json, ToJson

SECONDS = 30
"""Time limit of one request. Slow answers can exceed it, so callers limit the whole exchange."""
MOST = 10_000_000
"""Maximum bytes read of a response."""


class StatusError(OSError):
    """A response with a status that is not a success."""

    def __init__(self, problem: str, status: int, text: str):
        super().__init__(problem)
        self.status, self.text = status, text


def call_json(
    url: str,
    headers: Mapping[str, str],
    body: ToJson = None,
    known: str = "",
    *,
    answers: bool = True,
) -> Json:
    """Sends a GET, or a POST of JSON.

    Args:
      url: URL with its query.
      headers: further headers; a content type replaces `application/json`.
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
        with _sent(request) as answer:
            return cast("Json", json.loads(answer.read(MOST))) if answers else None
    except StatusError as error:
        if known and (known == str(error.status) or f'"{known}"' in error.text):
            return None
        raise


def value_at(answer: Json, *path: str) -> Json:
    """Returns the value at a path of a JSON response.

    Raises:
      ValueError: the response has no such value.
    """
    for name in path:
        if not isinstance(answer, dict) or name not in answer:
            raise ValueError(f"the answer has no {'.'.join(path)}; check which service answers")
        answer = answer[name]
    return answer


def list_at(answer: Json, name: str) -> list[Json]:
    """Returns a list in a JSON response; empty if the response has none."""
    found = answer.get(name) if isinstance(answer, dict) else None
    return found if isinstance(found, list) else []


@contextmanager
def _sent(request: Request) -> Generator[HTTPResponse]:
    """Yields the response to a request; raises StatusError for a redirect or an error."""
    try:
        with _OPENER.open(request, timeout=SECONDS) as answer:
            yield answer
    except HTTPError as error:
        text = error.read(MOST).decode(errors="replace")
        problem = f"HTTP {error.code}: {text[:200]}"
        if place := error.headers.get("Location"):
            problem = f"it sends on to {place}; if you trust that address, name it"
        raise StatusError(problem, error.code, text) from error


class _Stay(HTTPRedirectHandler):
    """Rejects redirects, because the token in the headers would be sent along."""

    @override
    def redirect_request(self, *_: object, **__: object) -> None:
        return None  # so the redirect status is handled as an error


_OPENER = build_opener(_Stay)
