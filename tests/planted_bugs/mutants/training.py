"""Bugs of a training whose mechanism is right: what was priced is not what runs."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import AUDIT, PROBE, one, several

RECORDS = "tests/components/training/test_round_records.py"

KEEP_RAW = (
    modules.RUNNING,
    "Mechanism.aggregate",
    "self._next_round = round_index + 1",
    (
        "scale = self.plan.l2_norm_clip / 2.0 ** self.plan.grid_bits\n"
        "self._raw = np.asarray(sample_state[0], np.float64) * scale\n"
        "self._next_round = round_index + 1"
    ),
)

MUTANTS = (
    one(
        7,
        "record_of_another_history_is_resumed",
        (modules.KEYED, "TagChain.check", "sha is not None and sha != self.sha", "False"),
        f"{RECORDS}::test_record_of_another_history_is_refused",
    ),
    one(
        7,
        "record_is_bound_to_its_own_tag_only",
        (modules.KEYED, "TagChain.append", "bytes.fromhex(self.sha) + tag", "tag"),
        f"{RECORDS}::test_record_of_another_history_is_refused",
    ),
    one(
        7,
        "checkpoint_of_another_history_is_resumed",
        (
            "fedemb.training.trainer",
            "Trainer.restore",
            "chain.check(covered.tags_sha)",
            "None",
        ),
        f"{RECORDS}::test_resume_refuses_a_checkpoint_of_another_history",
    ),
    one(
        4,
        "noise_forgotten",
        (
            modules.CLIP,
            "ClippedSum.noised",
            "sums = self._noise.add('update', sums, grid_scale(plan))",
            "self._noise.add('update', sums, grid_scale(plan))",
        ),
        *PROBE,
    ),
    several(
        4,
        "mean_taken_before_the_noise",
        (
            KEEP_RAW,
            (
                modules.RUNNING,
                "Mechanism.aggregate",
                "noised / self.plan.normalizer",
                "self._raw / self.plan.normalizer",
            ),
        ),
        PROBE,
    ),
    several(
        4,
        "trainer_steps_with_the_raw_mean",
        (
            KEEP_RAW,
            (
                modules.LOOP,
                "run_rounds",
                "state = function.advance(server, state, output.mean)",
                (
                    "raw = mechanism._raw / mechanism.plan.normalizer\n"
                    "state = function.advance(server, state, raw.astype('float32'))"
                ),
            ),
        ),
        AUDIT,
    ),
    several(
        4,
        "public_digest_of_the_raw_sum",
        (
            KEEP_RAW,
            (modules.RUNNING, "Mechanism.aggregate", "mean.tobytes", "self._raw.tobytes"),
        ),
        AUDIT,
    ),
    several(
        10,
        "mean_shrunk_by_its_raw_norm",
        (
            KEEP_RAW,
            (
                modules.RUNNING,
                "Mechanism.aggregate",
                "mean = (noised / self.plan.normalizer).astype(np.float32)",
                (
                    "shrink = 1 + np.linalg.norm(self._raw) / self.plan.normalizer\n"
                    "mean = (noised / self.plan.normalizer / shrink).astype(np.float32)"
                ),
            ),
        ),
        AUDIT,
    ),
    one(
        16,
        "stops_when_the_raw_loss_is_low",
        (
            modules.LOOP,
            "run_rounds",
            "yield Round(index, clip, sums, record, state, seconds)",
            (
                "yield Round(index, clip, sums, record, state, seconds)\n"
                "if index > 2 and sums.clients[:, 2].mean() < 1000000000.0:\n"
                "    return"
            ),
        ),
        *AUDIT,
    ),
    one(
        1,
        "clip_a_tenth_too_long",
        (modules.CLIP, "ClippedSum.record", "self._grid", "1.1 * self._grid"),
        *AUDIT,
    ),
)
"""The audit of the mechanism sees them."""
