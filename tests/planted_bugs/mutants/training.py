"""Bugs of a training whose mechanism is right: what was priced is not what runs."""

from __future__ import annotations

from tests.planted_bugs.mutants.places import AUDIT, CLIP, LOOP, PROBE, RUNNING, one
from tests.planted_bugs.mutation import Mutant

MEAN = "        mean = flat.astype(np.float32)\n"
RAW = "self._raw / self.plan.normaliser"
SUMS = "        flat, event = self._noised_mean("
KEEP_RAW = (
    RUNNING,
    SUMS,
    """        scale = self.l2_norm_clip / 2.0**self.plan.grid_bits
        self._raw = np.asarray(sample_state[0], np.float64) * scale
"""
    + SUMS,
)

MUTANTS = (
    one(
        4,
        "noise_forgotten",
        (
            CLIP,
            'sums = self._noise.add("update", sums, grid_scale(plan))',
            'self._noise.add("update", sums, grid_scale(plan))',
        ),
        *PROBE,
    ),
    Mutant(
        4,
        "mean_taken_before_the_noise",
        (KEEP_RAW, (RUNNING, MEAN, f"        mean = ({RAW}).astype(np.float32)\n")),
        PROBE,
    ),
    Mutant(
        4,
        "trainer_steps_with_the_raw_mean",
        (
            KEEP_RAW,
            (
                LOOP,
                "        state = function.advance(server, state, output.mean)\n",
                "        raw = mechanism._raw / mechanism.plan.normaliser\n"
                "        state = function.advance(server, state, raw.astype('float32'))\n",
            ),
        ),
        AUDIT,
    ),
    Mutant(
        4,
        "public_digest_of_the_raw_sum",
        (
            KEEP_RAW,
            (
                RUNNING,
                "hashlib.sha256(mean.tobytes()).hexdigest()",
                "hashlib.sha256(self._raw.tobytes()).hexdigest()",
            ),
        ),
        AUDIT,
    ),
    Mutant(
        10,
        "mean_shrunk_by_its_raw_norm",
        (
            KEEP_RAW,
            (
                RUNNING,
                MEAN,
                "        shrink = 1 + np.linalg.norm(self._raw) / self.plan.normaliser\n"
                "        mean = (flat / shrink).astype(np.float32)\n",
            ),
        ),
        AUDIT,
    ),
    one(
        16,
        "stops_when_the_raw_loss_is_low",
        (
            LOOP,
            "        yield Round(index, clip, sums, record, state, seconds)\n",
            "        yield Round(index, clip, sums, record, state, seconds)\n"
            "        if index > 2 and sums.clients[:, 2].mean() < 1e9:\n"
            "            return\n",
        ),
        *AUDIT,
    ),
    one(
        1,
        "clip_a_tenth_too_long",
        (CLIP, "        factor = self._grid / ops", "        factor = 1.1 * self._grid / ops"),
        *AUDIT,
    ),
)
"""The audit of the mechanism sees them."""
