"""Checks that noise and coins of a run are independent wherever the guarantee requires it.

Receipts show that each round contains its noise. They redraw the noise with the same function, so
they cannot detect a function that gives several rounds the same noise. This module compares the
keystreams and the participants of different rounds, quantities, runs and keys. All compared values
follow from keys, tags and plan: no private value is read. The false alarm rate of each check is
bounded for every plan, by Chernoff or an exact distribution.
"""

# scipy ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from scipy import special

from fedemb.documents.mechanism_audit import Independence
from fedemb.engine.audit.attempt_keys import AttemptKeys
from fedemb.engine.audit.canaries import CANARIES, CanaryIndex
from fedemb.keys import derive
from fedemb.privacy.accounting.fourier import spectrum_of, values_of
from fedemb.privacy.randomness.noise import Floats, gaussian, round_tag, tensor_key

if TYPE_CHECKING:
    from fedemb.privacy.mechanisms.mechanism import MechanismPlan

FALSE_ALARM = 1e-8
"""Maximum probability that a correct run fails one of the ten checks."""
NORMALS = 2 * CANARIES
"""Compared normals of each keystream."""
_FIRST = 64
"""First rounds that are compared in pairs; further compared rounds are powers of two and the last
rounds."""
_LAST = 8
_BLOCK = 1 << 16
"""Normals per keystream block of `noise`."""
_LONGEST = 1 << 18
"""Normals compared at every offset."""
_MOST_COINS = 10**7
"""Maximum coins per key, except for `_FEWEST` rounds."""
_FEWEST = 12
_CALLS = 4096
"""Rounds of a random allocation with drawn participants."""

Bits = npt.NDArray[np.bool_]


def independence(
    plan: MechanismPlan, keys: AttemptKeys, tags: Sequence[bytes], size: int
) -> Independence:
    """Compares the noise and the coins of a finished run.

    Args:
      plan: plan of the run.
      keys: of the attempt.
      tags: tags of the noise of each round, in order.
      size: number of noised weights per round.

    Returns:
      Number of compared rounds and names of failed checks.
    """
    checks: dict[str, Callable[[], bool]] = {
        "noise_tags": lambda: _tags_differ(keys.key("noise"), tags),
        "noise_rounds": lambda: _rounds_differ(keys, tags, size),
        "noise_vector": lambda: _vector_is_fresh(keys, tags, size),
        "noise_quantities": lambda: _quantities_differ(keys, tags),
        "noise_keys": lambda: _keys_differ(keys, tags),
    }
    if getattr(plan, "rounds_per_epoch", 1) > 1:
        checks["coins_epochs"] = lambda: _allocation_is_fresh(plan, keys)
    elif plan.chance is not None and plan.chance < 1:
        places = max(plan.virtual_clients, int(getattr(plan, "users_lower_bound", 0)))
        most = max(_FEWEST, _MOST_COINS // places)
        coins = _Coins(plan, keys, _compared_rounds(plan.rounds)[:most])
        checks |= {
            "coins_rounds": coins.rounds_differ,
            "coins_units": coins.units_differ,
            "coins_keys": coins.keys_differ,
            "coins_noise": lambda: coins.differ_from_noise(tags),
        }
    failed = sorted(name for name, holds in checks.items() if not holds())
    return Independence(rounds=len(tags), failed=failed)


# ---- noise --------------------------------------------------------------------------------------


def _tags_differ(noise_key: bytes, tags: Sequence[bytes]) -> bool:
    """Returns whether each round has its own tag, which depends on round, key and every value."""
    numbers = np.zeros(3 * NORMALS, np.int64)
    variants = [round_tag(noise_key, r, {"update": numbers}) for r in (0, 1, 256, 1 << 16)]
    for place in (0, numbers.size // 2, numbers.size - 1):
        changed = numbers.copy()
        changed[place] = 1 << 40
        variants.append(round_tag(noise_key, 0, {"update": changed}))
    for below in (0, 1):
        quantities = {"update": numbers, "below": np.array([below])}
        variants.append(round_tag(noise_key, 0, quantities))
    variants.append(round_tag(derive(noise_key, "another"), 0, {"update": numbers}))
    return len(set(variants)) == len(variants) and len(set(tags)) == len(tags)


def _rounds_differ(keys: AttemptKeys, tags: Sequence[bytes], size: int) -> bool:
    """Returns whether no round repeats the noise of another, at any offset."""
    key = keys.key("noise")
    starts = {_normals(key, tag)[:2].tobytes() for tag in tags}
    some = np.array([_normals(key, tags[number]) for number in _compared_rounds(len(tags))])
    numbers = {0, 1, len(tags) // 2, len(tags) - 1} & set(range(len(tags)))
    drawn = [_drawn(key, tags[number], size) for number in sorted(numbers)]
    apart = all(_unrelated(*pair) for pair in itertools.combinations(drawn, 2))
    return len(starts) == len(tags) and _orthogonal(some) and apart


def _vector_is_fresh(keys: AttemptKeys, tags: Sequence[bytes], size: int) -> bool:
    """Returns whether the noise of one round never repeats, also in distant blocks."""
    noise = gaussian(tensor_key(keys.key("noise"), tags[-1], "update"), size)
    starts = [noise[at : at + 2].tobytes() for at in range(0, size - 1, _BLOCK)]
    near = noise[:_LONGEST]
    order = np.argsort(near[:-1], kind="stable")
    same = np.flatnonzero(np.diff(near[order]) == 0)
    # Two equal numbers in a row have a chance of 2^-100; one alone may come up.
    repeated = near[order[same] + 1] == near[order[same + 1] + 1]
    return len(set(starts)) == len(starts) and not repeated.any() and _unrelated(near, None)


def _quantities_differ(keys: AttemptKeys, tags: Sequence[bytes]) -> bool:
    """Returns whether update and count of an adaptive clip have separate noise."""
    key = keys.key("noise")
    some = [tags[number] for number in _compared_rounds(len(tags))]
    rows = [_normals(key, tag, name) for tag in some for name in ("update", "below", "another")]
    return _orthogonal(np.array(rows))


def _keys_differ(keys: AttemptKeys, tags: Sequence[bytes]) -> bool:
    """Returns whether attempts, runs, inputs, canaries and coins have separate keys."""
    everybody = [keys, *keys.others]
    rows = [_normals(one.key("noise"), tags[0]) for one in everybody]
    rows += [gaussian(one.key(name), NORMALS) for one in everybody for name in ("noise", "coins")]
    return _orthogonal(np.array(rows))


def _normals(key: bytes, tag: bytes, name: str = "update") -> Floats:
    return gaussian(tensor_key(key, tag, name), NORMALS)


def _drawn(key: bytes, tag: bytes, size: int) -> Floats:
    """The start of a round's noise as it was drawn: blocks do not depend on the size."""
    return gaussian(tensor_key(key, tag, "update"), size if size < _LONGEST else _LONGEST)


def _orthogonal(rows: Floats) -> bool:
    """Whether all pairs of independent rows of normals, `[rows, n]`, have a cosine near 0.

    The square of such a cosine has the law Beta(1/2, (n - 1) / 2).
    """
    if len(rows) < 2:
        return True
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = np.abs(np.triu(unit @ unit.T, 1))
    chance = FALSE_ALARM / (len(rows) * (len(rows) - 1) / 2)
    most = 1 - float(special.betaincinv((rows.shape[1] - 1) / 2, 0.5, chance))
    return bool(cosines.max() ** 2 <= most)  # NaN fails


def _unrelated(one: Floats, other: Floats | None) -> bool:
    """Whether two rows of normals are uncorrelated at every offset; None: one row with itself."""
    points, alone = one.size, other is None
    spectrum = spectrum_of(one)
    product = spectrum * np.conj(spectrum if other is None else spectrum_of(other))
    sums = np.abs(values_of(product, points))[1 if alone else 0 :]
    return not sums.size or bool(sums.max() <= _largest_sum(points, FALSE_ALARM / (6 * points)))


def _largest_sum(terms: int, chance: float) -> float:
    """A bound on a sum of products of normals, by Chernoff.

    A sum of n_i n_(i+lag) round a circle is a quadratic form whose eigenvalues are cosines with
    mean 0; by convexity its moments are largest where all are 1 or -1, as at half the circle.
    """
    slopes = np.linspace(1e-4, 0.499, 2000)
    moments = -terms / 4 * np.log1p(-4 * np.square(slopes))
    return float(((moments + math.log(2 / chance)) / slopes).min())


# ---- coins --------------------------------------------------------------------------------------


def _compared_rounds(rounds: int) -> list[int]:
    """Rounds that are compared in pairs: the first, the last, and those at powers of two."""
    powers = {1 << exponent for exponent in range(6, 40)}
    some = {*range(_FIRST), *powers, *(p + 1 for p in powers), *range(rounds - _LAST, rounds)}
    return sorted(number for number in some if 0 <= number < rounds)


class _Coins:
    """Participation of 256 synthetic users in some rounds, by the run's own coins."""

    def __init__(self, plan: MechanismPlan, keys: AttemptKeys, rounds: Sequence[int]):
        self._plan = plan.replaced(virtual_clients=max(CANARIES, plan.virtual_clients))
        if plan.adaptive_clip is not None:
            self._plan = self._plan.replaced(adaptive_clip=None)
        self._secrets, self._rounds = keys, list(rounds)
        chance = cast("float", plan.chance)
        self._chance, self._both = chance, chance**2
        if plan.samples_by_index:  # without replacement, from at least as many slots as canaries
            slots = max(CANARIES, int(getattr(plan, "users_lower_bound", 0)))
            drawn = round(chance * int(getattr(plan, "users_lower_bound", 0)))
            self._chance = drawn / slots
            self._both = drawn * (drawn - 1) / (slots * (slots - 1))
        self._taken = self._drawn(keys)

    def _drawn(self, keys: AttemptKeys) -> Bits:
        """Participation, `[rounds, canaries]`."""
        sampler, index = self._plan.sampler(keys.key("coins")), CanaryIndex(self._plan)
        taken = np.zeros((len(self._rounds), CANARIES), np.bool_)
        for row, number in enumerate(self._rounds):
            for client in sampler.sample(number, index):
                taken[row, index.canaries(client)] = True
        return taken

    def rounds_differ(self) -> bool:
        """Returns whether participants of one round are independent of other rounds."""
        taken, half = self._taken, len(self._taken) // 2
        later = taken[2::2]
        pairs = [
            (taken[0 : 2 * half : 2], taken[1 : 2 * half : 2]),
            (taken[1::2][: len(later)], later),
            (taken[:half], taken[len(taken) - half :]),
        ]
        together = taken.astype(np.int64) @ taken.T.astype(np.int64)
        each = together[np.triu_indices(len(taken), 1)]
        same, enough = self._chance**2, FALSE_ALARM / 5
        return all(
            _as_likely(int((one & other).sum()), one.size, same, enough) for one, other in pairs
        ) and all(_as_likely(int(n), CANARIES, same, enough / each.size) for n in np.unique(each))

    def units_differ(self) -> bool:
        """Returns whether participants of a round are independent of each other."""
        taken, half = self._taken, CANARIES // 2
        total, enough = int(taken.sum()), FALSE_ALARM / 3
        halves = ((taken[:, 0::2], taken[:, 1::2]), (taken[:, :half], taken[:, half:]))
        return _as_likely(total, taken.size, self._chance, enough) and all(
            _as_likely(int((one & other).sum()), one.size, self._both, enough)
            for one, other in halves
        )

    def keys_differ(self) -> bool:
        """Returns whether other attempts, runs and inputs have other coins."""
        others = [self._taken & self._drawn(one) for one in self._secrets.others]
        enough = FALSE_ALARM / len(others)
        return all(
            _as_likely(int(both.sum()), both.size, self._chance**2, enough) for both in others
        )

    def differ_from_noise(self, tags: Sequence[bytes]) -> bool:
        """Whether coins and noise do not come from the same numbers, by Hoeffding's bound."""
        key = self._secrets.key("noise")
        taken = self._taken - self._chance
        noise = np.array([_normals(key, tags[number]) for number in self._rounds])
        squares = np.square(noise[:, :CANARIES]) + np.square(noise[:, CANARIES:])
        uniform = np.exp(-squares / 2) - 0.5
        found = abs(float(np.sum(taken * uniform)))
        most = math.sqrt(float(np.sum(np.square(taken))) * math.log(2 / FALSE_ALARM) / 2)
        return found <= most


def _allocation_is_fresh(plan: MechanismPlan, keys: AttemptKeys) -> bool:
    """Whether each unit draws its own round in every epoch, independently."""
    steps = int(getattr(plan, "rounds_per_epoch", 1))
    epochs = min(plan.rounds // steps, max(2, _CALLS // steps))
    sampler, index = plan.sampler(keys.key("coins")), CanaryIndex(plan)
    other = plan.sampler(next(iter(keys.others)).key("coins"))
    places, again = np.full((2, epochs, CANARIES), -1)
    for number in range(epochs * steps):
        for drawn, source in ((places, sampler), (again, other)):
            for client in source.sample(number, index):
                drawn[number // steps, index.canaries(client)] = number % steps
    half, even = CANARIES // 2, 2 * (epochs // 2)
    pairs = [
        (places[0:even:2], places[1:even:2]),
        (places[: epochs // 2], places[-(epochs // 2) :] if epochs > 1 else places[:0]),
        (places[:, 0::2], places[:, 1::2]),
        (places[:, :half], places[:, half:]),
        (places, again),
    ]
    return bool((places >= 0).all()) and all(
        _as_likely(int((one == two).sum()), one.size, 1 / steps, FALSE_ALARM / len(pairs))
        for one, two in pairs
    )


def _as_likely(hits: int, trials: int, probability: float, chance: float) -> bool:
    """Whether the chance of such a count reaches `chance`; trials may be negatively associated.

    By Chernoff: a count beyond k of n has a chance of at most exp(-n KL(k/n || p)).
    """
    if not trials:
        return True
    share = hits / trials
    terms = ((share, probability), (1 - share, 1 - probability))
    divergence = 0.0
    for found, wanted in terms:
        if found > 0:
            divergence += found * math.log(found / wanted) if wanted > 0 else math.inf
    return trials * divergence <= math.log(2 / chance)
