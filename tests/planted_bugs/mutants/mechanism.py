"""Bugs of clip, noise, sampling, division and price."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import (
    AGAIN,
    AUDIT,
    COINS,
    INDEPENDENT,
    PLAN,
    PROBE,
    QUERIES,
    REPLAY,
    one,
    several,
)

STABLE = (
    "tests/components/privacy/test_privacy_sampling.py::"
    "test_removing_a_user_changes_what_one_virtual_client_holds",
)
"""A user who leaves moves no one else between virtual clients."""
SAMPLES = "tests/components/privacy/test_privacy_sampling.py"
DEAL = (
    "tests/components/embedding/test_embedding_rounds.py::"
    "test_one_user_sends_no_other_client_to_another_worker",
)

MUTANTS = (
    # 1-3, 13: clipping
    one(
        1,
        "no_clipping",
        (
            modules.CLIP,
            "ClippedSum.record",
            "ops.maximum(clip, norm * (1.0 + _CLIP_SLACK))",
            "clip",
        ),
        *REPLAY,
    ),
    one(
        2,
        "clip_per_tensor",
        (
            modules.CLIP,
            "ClippedSum.record",
            "ops.sqrt(ops.sum(ops.square(flat)))",
            "ops.max(ops.stack([ops.norm(ops.cast(t, 'float64')) for t in update]))",
        ),
        *REPLAY,
    ),
    one(
        3,
        "weighted_after_the_clip",
        (
            modules.CLIP,
            "ClippedSum.record",
            "ops.cast(kept, 'int64')",
            "ops.cast(kept, 'int64') * 3",
        ),
        *REPLAY,
    ),
    several(
        3,
        "clip_the_sum_only",
        (
            (
                modules.CLIP,
                "ClippedSum.record",
                "ops.maximum(clip, norm * (1.0 + _CLIP_SLACK))",
                "clip",
            ),
            (
                modules.CLIP,
                "ClippedSum.noised",
                "plan = self._plan",
                (
                    "plan = self._plan\n"
                    "length = float(np.linalg.norm(sums))\n"
                    "most = self._grid * plan.normalizer\n"
                    "sums = (sums * min(1.0, most / max(1.0, length))).astype(np.int64)"
                ),
            ),
        ),
        REPLAY,
    ),
    one(
        13,
        "nan_reaches_the_sum",
        (modules.CLIP, "ClippedSum.record", "ops.isfinite(norm)", "ops.ones_like(norm, 'bool')"),
        f"{QUERIES}::test_a_non_finite_update_counts_as_zero",
    ),
    one(
        13,
        "nan_is_mended_and_counts",
        (
            modules.CLIP,
            "ClippedSum.record",
            "norm = ops.sqrt(ops.sum(ops.square(flat)))",
            (
                "flat = ops.where(ops.isfinite(flat), flat, ops.ones_like(flat))\n"
                "norm = ops.sqrt(ops.sum(ops.square(flat)))"
            ),
        ),
        f"{QUERIES}::test_a_non_finite_update_counts_as_zero",
    ),
    # 4-7, 12: noise
    one(
        6,
        "small_radii_on_few_circles",
        (
            modules.NOISE,
            "_box_muller",
            "np.log1p(-distance[above])",
            "np.log(1.0 - distance[above])",
        ),
        f"{QUERIES}::test_radii_are_right_to_the_last_digits_at_both_ends_of_the_uniform",
    ),
    one(
        4,
        "noise_scaled_as_for_the_mean",
        (
            modules.KEYED,
            "grid_scale",
            "plan.noise_multiplier * 2.0 ** plan.grid_bits",
            "plan.noise_multiplier * 2.0 ** plan.grid_bits / plan.normalizer",
        ),
        *PROBE,
    ),
    one(
        5,
        "variance_for_deviation",
        (modules.KEYED, "grid_scale", "plan.noise_multiplier", "plan.noise_multiplier ** 2"),
        *PROBE,
    ),
    one(
        4,
        "noise_3_percent_short",
        (modules.KEYED, "grid_scale", "plan.noise_multiplier", "0.97 * plan.noise_multiplier"),
        "tests/statistical/test_independence.py::test_noise_of_rounds_has_the_planned_scale",
    ),
    one(
        6,
        "seed_reused_across_rounds",
        (modules.KEYED, "add", "tensor_key(self._key, self.tag, name)", "self._key"),
        *PROBE,
    ),
    one(
        6,
        "seed_reused_across_processes",
        (modules.KEYED, "add", "tensor_key(self._key, self.tag, name)", "self.tag and bytes(32)"),
        *PROBE,
    ),
    one(
        6,
        "seed_reused_across_entries",
        (
            modules.NOISE,
            "add_rounded_noise.fill",
            "np.rint(noise, out=noise)",
            ("noise[1::2] = noise[:2 * (noise.size // 2):2]\nnp.rint(noise, out=noise)"),
        ),
        *PROBE,
    ),
    one(
        6,
        "noise_key_without_its_tag",
        (
            modules.NOISE,
            "tensor_key",
            'derive(noise_key, "normals", tag, name)',
            'derive(noise_key, "normals", b"", name)',
        ),
        *INDEPENDENT,
    ),
    one(
        6,
        "noise_key_without_the_attempt",
        (
            modules.NOISE,
            "run_key",
            'derive(root_key, f"{purpose}/1", run_id, str(attempt), inputs_sha)',
            'derive(root_key, f"{purpose}/1", run_id, inputs_sha)',
        ),
        *INDEPENDENT,
    ),
    one(
        6,
        "noise_of_two_quantities_is_the_same",
        (
            modules.NOISE,
            "tensor_key",
            'derive(noise_key, "normals", tag, name)',
            'derive(noise_key, "normals", tag)',
        ),
        *INDEPENDENT,
    ),
    one(
        7,
        "noise_ignores_the_data",
        (modules.NOISE, "round_tag", "digest.update(data.data)", ""),
        *AGAIN,
    ),
    one(
        7,
        "fresh_noise_on_replay",
        (modules.NOISE, "round_tag", "hashlib.sha256()", "hashlib.sha256(os.urandom(8))"),
        *AGAIN,
    ),
    one(
        12,
        "empty_round_is_skipped",
        (modules.CLIP, "ClippedSum.noised", "plan.private", "plan.private and sums.any()"),
        *PROBE,
    ),
    # 8-11: grouping, sampling, dividing
    one(
        8,
        "user_in_two_clients",
        (
            modules.SAMPLING,
            "sample_groups",
            "np.sort(index.members(grouping, group))",
            (
                "np.union1d(index.members(grouping, group), index.members(grouping, "
                "(group + 1) % plan.virtual_clients))"
            ),
        ),
        *REPLAY,
    ),
    one(
        9,
        "chunks_of_a_sorted_list",
        (
            modules.SAMPLING,
            "sample_groups",
            "np.sort(index.members(grouping, group))",
            "np.arange(group, index.user_count, plan.virtual_clients)",
        ),
        *STABLE,
    ),
    one(
        9,
        "clients_dealt_by_size",
        (
            modules.ROUNDS,
            "RoundFunction._pack",
            (
                "for unit in units:\n"
                "    worker = unit.worker_key % self.worker_count\n"
                "    shares[worker].append(self._data(unit, round_index))"
            ),
            (
                "order = sorted(units, key=lambda unit: -len(unit.labels))\n"
                "for place, unit in enumerate(order):\n"
                "    shares[place % self.worker_count].append(self._data(unit, round_index))"
            ),
        ),
        *DEAL,
    ),
    several(
        10,
        "divided_by_who_showed_up",
        (
            (
                modules.RUNNING,
                "Mechanism.sample_clients",
                "return self._sampler.sample(round_index, index)",
                (
                    "clients = self._sampler.sample(round_index, index)\n"
                    "self._present = sum((len(client.users) for client in clients)) / 3\n"
                    "return clients"
                ),
            ),
            (
                modules.RUNNING,
                "Mechanism.aggregate",
                "(noised / self.plan.normalizer)",
                "(noised / max(1.0, getattr(self, '_present', 1.0)))",
            ),
        ),
        REPLAY,
    ),
    one(
        10,
        "weighted_by_examples",
        (
            modules.ROUNDS,
            "body",
            "state = query.accumulate_preprocessed_record(state, record)",
            (
                "weight = tf.cast(stop - start, tf.int64)\n"
                "record = tf.nest.map_structure(lambda part: part * weight, record)\n"
                "state = query.accumulate_preprocessed_record(state, record)"
            ),
        ),
        *AUDIT,
    ),
    one(
        11,
        "fixed_size_priced_as_poisson",
        (
            modules.SAMPLING,
            "sample_groups",
            "sampled = np.flatnonzero(heads(words, probability))",
            (
                "count = round(probability * plan.virtual_clients)\n"
                "sampled = np.sort(np.argsort(words)[:count])"
            ),
        ),
        *COINS,
    ),
    one(
        11,
        "same_clients_in_every_round",
        (
            modules.SAMPLING,
            "Sampler.draw",
            'derive(self._coin_key, "round", str(round_index))',
            'derive(self._coin_key, "round", "0")',
        ),
        *INDEPENDENT,
    ),
    one(
        11,
        "epochs_priced_as_poisson",
        (
            modules.SAMPLING,
            "sample_groups",
            "sampled = np.flatnonzero(heads(words, probability))",
            (
                "count = round(probability * plan.virtual_clients)\n"
                "turn = np.arange(round_index * count, (round_index + 1) * count)\n"
                "sampled = np.sort(turn % plan.virtual_clients)"
            ),
        ),
        *COINS,
    ),
    one(
        11,
        "coins_come_up_twice_as_often",
        (modules.NOISE, "heads", "probability", "min(1.0, 2 * probability)"),
        *COINS,
    ),
    # 15, 17: price
    one(
        15,
        "naive_sensitivity",
        (
            modules.GROUP_POISSON_GAUSSIAN,
            "GroupPoissonGaussian",
            "relation_name = 'REPLACE_ONE'",
            "",
        ),
        f"{PLAN}::test_events_follow_the_rule_table",
    ),
    # 18: turns and correlated noise
    one(
        18,
        "turns_one_round_too_close",
        (
            modules.SAMPLING,
            "record",
            "round_index - self._last[groups] < self._separation",
            "round_index - self._last[groups] < self._separation - 1",
        ),
        f"{SAMPLES}::test_participation_log_refuses_too_often_too_soon_and_twice",
    ),
    one(
        18,
        "order_of_turns_differs_in_each_pass",
        (modules.SAMPLING, "_scheduled", "self._order", "np.roll(self._order, round_index)"),
        f"{SAMPLES}::test_cyclic_schedule_is_even_and_can_be_entered_anywhere",
    ),
    one(
        18,
        "correlated_noise_begins_again_after_a_resume",
        (
            modules.KEYED,
            "add_correlated",
            ("for tag in self.tags:\n    self._stream.next(tensor_key(self._key, tag, name))"),
            ("for tag in self.tags[:0]:\n    self._stream.next(tensor_key(self._key, tag, name))"),
        ),
        f"{QUERIES}::test_a_resumed_run_equals_the_uninterrupted_one",
    ),
)
"""By family."""
