"""Sensitivity of tree aggregation under bounded participation, in our own numpy.

A user whose virtual client takes part in rounds t_1 < t_2 < ... (at least `min_separation` apart,
at most `max_participations` of them) is under c_v of the leaves of node v. If every participation
moves the sum by one unit in the worst direction, node v moves by c_v, and the squared sensitivity
is the maximum of sum_v c_v^2 over all patterns. Nodes are the complete dyadic ones, as in
tensorflow-privacy's aggregator (Kairouz et al., arXiv 2103.00039, appendix D).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_IMPOSSIBLE = -math.inf


@functools.lru_cache(maxsize=1024)
def sensitivity(
    rounds: int, min_separation: int, max_participations: int, restart_every: int = 0
) -> float:
    """Returns the L2 sensitivity of the tree's nodes per unit of change.

    Between trees the separation is not used, which can only make the result larger.

    The poster's run (docs/explanation/method.md#published-figures):

    >>> round(sensitivity(800, 77, 11) ** 2)
    177

    Args:
      rounds: leaves in all.
      min_separation: least difference between the round numbers of two participations.
      max_participations: most participations in the run.
      restart_every: leaves per tree; 0 for a single one.
    """
    if restart_every <= 0 or restart_every >= rounds:
        sizes = [rounds]
    else:
        sizes = [restart_every] * (rounds // restart_every)
        sizes += [rounds % restart_every] if rounds % restart_every else []
    if min(max_participations, math.ceil(rounds / min_separation)) == 1:
        return math.sqrt(sizes[0].bit_length())  # One leaf, and all nodes above it.
    most = min(max_participations, math.ceil(rounds / min_separation) + len(sizes))
    best = np.zeros(most + 1)
    for size in sizes:
        values = _tree_values(size, min_separation, most)
        best = np.array(
            [max(best[k - j] + values[j] for j in range(k + 1)) for k in range(most + 1)]
        )
    return math.sqrt(float(best.max()))


def _tree_values(leaves: int, gap: int, most: int) -> list[float]:
    """Largest squared sensitivity of one tree with exactly k participations, for k = 0..most."""
    return [
        float(table[0, gap]) if table is not None else _IMPOSSIBLE
        for table in (_block(leaves, gap, k) for k in range(most + 1))
    ]


@functools.lru_cache(maxsize=65536)
def _block(leaves: int, gap: int, ones: int) -> Floats | None:
    """Best value of a block by (lead, tail), `[gap + 1, gap + 1]`, or None if nothing fits.

    `lead`: the first participation is at this leaf or later. `tail`: the next one outside may come
    this many leaves after the block, and keeps the gap.
    """
    if ones > math.ceil(leaves / gap):
        return None
    if ones == 0:
        return np.zeros((gap + 1, gap + 1))
    full = leaves & (leaves - 1) == 0
    if ones == 1:
        return _single(leaves, gap)
    left_leaves = leaves // 2 if full else 1 << (leaves.bit_length() - 1)
    right_leaves = leaves - left_leaves
    out = np.full((gap + 1, gap + 1), _IMPOSSIBLE)
    steps = np.arange(gap + 1)
    for right_ones in range(ones + 1):
        left = _block(left_leaves, gap, ones - right_ones)
        right = _block(right_leaves, gap, right_ones)
        if left is None or right is None:
            continue
        if right_ones == 0:
            joined = left[:, np.minimum(gap, steps + right_leaves)]
        elif right_ones == ones:
            joined = right[np.maximum(0, steps - left_leaves), :]
        else:
            # The right part starts no earlier than leaf j, which the left part has to respect.
            joined = np.stack([(left[lead][:, None] + right).max(axis=0) for lead in steps])
        out = np.maximum(out, joined)
    return out + (ones * ones if full else 0)


@functools.lru_cache(maxsize=4096)
def _single(leaves: int, gap: int) -> Floats:
    """`_block` for one participation: the deepest leaf within the allowed range."""
    depth = np.empty(leaves)
    start, left = 0, leaves
    while left:
        size = 1 << (left.bit_length() - 1)
        depth[start : start + size] = size.bit_length()  # Nodes above a leaf of a full block.
        start, left = start + size, left - size
    out = np.full((gap + 1, gap + 1), _IMPOSSIBLE)
    for lead in range(min(gap + 1, leaves)):
        # Depth falls from left to right, so the first allowed leaf is the best.
        out[lead, np.arange(gap + 1) + leaves - gap >= lead] = depth[lead]
    return out
