"""Records of a source that are damaged before there is an image to decode."""

from __future__ import annotations

from dataclasses import dataclass

_SHOWN = 120


@dataclass(frozen=True)
class BadRecord:
    """Takes the place of the image in a batch; it is counted, whatever its other columns are."""

    reason: str
    """Code of the reason, see `fedemb.partition.check.BAD`."""
    read: str = ""
    """Text that was read, for the data owner. Private."""

    @classmethod
    def of(cls, reason: str, read: str | bytes) -> BadRecord:
        """Returns a bad record with an excerpt of the text or bytes that were read."""
        return cls(reason, excerpt(read))


def excerpt(read: str | bytes) -> str:
    r"""Returns the start of a value as a Python literal; bytes also as Latin-1 text.

    >>> print(excerpt("Smith, jr,a.jpg"), excerpt(b"Zo\xeb"))
    'Smith, jr,a.jpg' b'Zo\xeb' (as Latin-1 'Zoë')
    """
    short = read[:_SHOWN]
    more = "..." if len(read) > _SHOWN else ""
    if isinstance(short, str):
        return repr(short) + more
    latin = short.decode("latin-1")
    return repr(short) + more + (f" (as Latin-1 {latin!r})" if latin.isprintable() else "")
