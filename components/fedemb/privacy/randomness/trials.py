"""Draws the secret number of trials of a search, and the recipe of each trial, from a key.

Words of 256 bits are compared with a distribution function of 60 digits, so the draws are within
1e-50 of the law that is priced, far below the share of the noise sampler.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Literal

from fedemb.keys import derive

_DIGITS = 60
"""Digits of the distribution function."""
_BITS = 256
"""Bits of one word."""

Law = Literal["logarithmic", "geometric", "poisson"]


def draw_trials(key: bytes, law: Law, mean: float, recipes: int) -> list[int]:
    """Returns the recipe of each trial; the length of the list is the number of trials.

    Recipes are drawn uniformly, with replacement. Everything follows from the key, so a resumed
    search draws the same trials.

    Args:
      key: 32 secret bytes, used for nothing else.
      law: law of the number of trials.
      mean: mean number of trials, above 1.
      recipes: number of declared recipes.

    Returns: Indices in 0..recipes-1. Empty only with the law `poisson`.
    """
    number = trials_at(_word(key, "number"), law, mean)
    return [_word(key, "recipe", str(trial)) * recipes >> _BITS for trial in range(number)]


def trials_at(word: int, law: Law, mean: float) -> int:
    """Returns the number of trials at a quantile.

    >>> [trials_at(share * 2**256 // 10, "logarithmic", 10.0) for share in (1, 5, 9)]
    [1, 4, 26]

    Args:
      word: the quantile, times 2^256, in [0, 2^256).
      law: law of the number of trials.
      mean: mean number of trials, above 1.
    """
    with localcontext() as context:
        context.prec = _DIGITS
        quantile, below = Decimal(word) / (1 << _BITS), Decimal(0)
        for number, chance in probabilities(law, mean):
            below += chance
            # Rounding may leave a sum below 1; beyond this chance no quantile is lost.
            if below > quantile or (number > mean and chance < Decimal(10) ** (2 - _DIGITS)):
                return number
    raise AssertionError("the law has infinitely many numbers")


def probabilities(law: Law, mean: float) -> Iterator[tuple[int, Decimal]]:
    """Yields each number of trials with its probability, in order.

    Logarithmic and geometric are the truncated negative binomial laws of shape 0 and 1 (arXiv
    2110.03620, definition 1), with the parameter gamma that has this mean.
    """
    exact = Decimal(mean)
    if law == "poisson":
        chance = (-exact).exp()
        for number in itertools.count():
            yield number, chance
            chance *= exact / (number + 1)
    gamma = 1 / exact if law == "geometric" else _logarithmic_gamma(exact)
    shape = 1 if law == "geometric" else 0
    chance = gamma if shape else (1 - gamma) / -gamma.ln()
    for number in itertools.count(1):
        yield number, chance
        chance *= (1 - gamma) * (number + shape) / (number + 1)


@functools.lru_cache(maxsize=16)
def _logarithmic_gamma(mean: Decimal) -> Decimal:
    """Returns gamma with (1/gamma - 1) / ln(1/gamma) = mean."""
    with localcontext() as context:
        context.prec = _DIGITS
        low, high = Decimal(0), Decimal(1)
        for _ in range(4 * _DIGITS):
            gamma = (low + high) / 2
            if (1 / gamma - 1) / -gamma.ln() > mean:
                low = gamma
            else:
                high = gamma
        return high


def _word(key: bytes, *labels: str) -> int:
    return int.from_bytes(derive(key, "trials/1", *labels), "big")
