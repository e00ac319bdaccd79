"""Bugs of clip, noise, sampling, division and price."""

from __future__ import annotations

from tests.planted_bugs.mutants.places import (
    AGAIN,
    AUDIT,
    AUDITING,
    CLIP,
    COINS,
    KEYED,
    MECHANISM,
    NOISE,
    PLAN,
    PRIVACY,
    PROBE,
    QUERIES,
    REPLAY,
    ROUNDS,
    RUNNING,
    SAMPLING,
    one,
)
from tests.planted_bugs.mutation import Mutant

BOUNDED = "ops.maximum(clip, norm * (1.0 + _CLIP_SLACK))"
MEAN = "        mean = flat.astype(np.float32)\n"
STABLE = (
    "tests/components/privacy/test_privacy_sampling.py::"
    "test_removing_a_user_changes_what_one_virtual_client_holds",
)
"""A user who leaves moves nobody else between virtual clients."""
SAMPLES = "tests/components/privacy/test_privacy_sampling.py"
DEAL = (
    "tests/components/embedding/test_embedding_rounds.py::"
    "test_one_user_sends_no_other_client_to_another_worker",
)

MUTANTS = (
    # 1-3, 13: clipping
    one(1, "no_clipping", (CLIP, BOUNDED, "clip"), *REPLAY),
    one(
        2,
        "clip_per_tensor",
        (
            CLIP,
            "ops.sqrt(ops.sum(ops.square(flat)))",
            "ops.max(ops.stack([ops.norm(ops.cast(t, 'float64')) for t in update]))",
        ),
        *REPLAY,
    ),
    one(
        3,
        "weighted_after_the_clip",
        (
            CLIP,
            "        return (self._clip(clip, update)[0],)",
            "        return (self._clip(clip, update)[0] * 3,)",
        ),
        *REPLAY,
    ),
    Mutant(
        3,
        "clip_the_sum_only",
        (
            (CLIP, BOUNDED, "clip"),
            (
                CLIP,
                "        plan = self._plan\n        if plan.tracks",
                "        plan = self._plan\n        length = float(np.linalg.norm(sums))\n"
                "        most = self._grid * plan.normaliser\n"
                "        sums = (sums * min(1.0, most / max(1.0, length))).astype(np.int64)\n"
                "        if plan.tracks",
            ),
        ),
        REPLAY,
    ),
    one(
        13,
        "nan_reaches_the_sum",
        (CLIP, "finite = ops.isfinite(norm)", "finite = ops.ones_like(norm, 'bool')"),
        f"{QUERIES}::test_a_non_finite_update_counts_as_zero",
    ),
    one(
        13,
        "nan_is_mended_and_counts",
        (
            CLIP,
            "        norm = ops.sqrt",
            "        flat = ops.where(ops.isfinite(flat), flat, ops.ones_like(flat))\n"
            "        norm = ops.sqrt",
        ),
        f"{QUERIES}::test_a_non_finite_update_counts_as_zero",
    ),
    # 4-7, 12: noise
    one(
        6,
        "small_radii_on_few_circles",
        (
            NOISE,
            "    radius[above] = np.log1p(-distance[above])\n",
            "    radius[above] = np.log(1.0 - distance[above])\n",
        ),
        f"{QUERIES}::test_radii_are_right_to_the_last_digits_at_both_ends_of_the_uniform",
    ),
    one(
        4,
        "noise_scaled_as_for_the_mean",
        (
            KEYED,
            "return plan.noise_multiplier * 2.0**plan.grid_bits",
            "return plan.noise_multiplier * 2.0**plan.grid_bits / plan.normaliser",
        ),
        *PROBE,
    ),
    one(
        5,
        "variance_for_deviation",
        (
            KEYED,
            "return plan.noise_multiplier * 2.0**plan.grid_bits",
            "return plan.noise_multiplier**2 * 2.0**plan.grid_bits",
        ),
        *PROBE,
    ),
    one(
        4,
        "noise_3_percent_short",
        (
            KEYED,
            "return plan.noise_multiplier * 2.0**plan.grid_bits",
            "return 0.97 * plan.noise_multiplier * 2.0**plan.grid_bits",
        ),
        f"{AUDITING}::test_canaries_of_a_sound_mechanism_measure_the_plan_in_200_runs",
    ),
    one(
        6,
        "seed_reused_across_rounds",
        (
            KEYED,
            "return add_rounded_noise(values, tensor_key(self._key, self.tag, name), scale)",
            "return add_rounded_noise(values, self._key, scale)",
        ),
        *PROBE,
    ),
    one(
        6,
        "seed_reused_across_processes",
        (
            KEYED,
            "return add_rounded_noise(values, tensor_key(self._key, self.tag, name), scale)",
            "return add_rounded_noise(values, self.tag and bytes(32), scale)",
        ),
        *PROBE,
    ),
    one(
        6,
        "seed_reused_across_entries",
        (
            NOISE,
            "        _box_muller(key, start // _BLOCK, noise)\n        noise *= scale\n",
            "        _box_muller(key, start // _BLOCK, noise)\n        noise *= scale\n"
            "        noise[1::2] = noise[: 2 * (noise.size // 2) : 2]\n",
        ),
        *PROBE,
    ),
    one(
        7,
        "noise_ignores_the_data",
        (NOISE, "        digest.update(data.data)\n", ""),
        *AGAIN,
    ),
    one(
        7,
        "fresh_noise_on_replay",
        (
            NOISE,
            "    digest = hashlib.sha256()\n    for name in sorted(quantities):",
            "    digest = hashlib.sha256(os.urandom(8))\n    for name in sorted(quantities):",
        ),
        *AGAIN,
    ),
    one(
        12,
        "empty_round_is_skipped",
        (
            CLIP,
            "        elif plan.private:\n",
            "        elif plan.private and sums.any():\n",
        ),
        *PROBE,
    ),
    # 8-11: grouping, sampling, dividing
    one(
        8,
        "user_in_two_clients",
        (
            SAMPLING,
            "        VirtualClient(grouping, group, np.sort(index.members(grouping, group)))\n"
            "        for group in map(int, sampled)",
            "        VirtualClient(\n"
            "            grouping,\n"
            "            group,\n"
            "            np.union1d(\n"
            "                index.members(grouping, group),\n"
            "                index.members(grouping, (group + 1) % plan.virtual_clients),\n"
            "            ),\n"
            "        )\n"
            "        for group in map(int, sampled)",
        ),
        *REPLAY,
    ),
    one(
        9,
        "chunks_of_a_sorted_list",
        (
            SAMPLING,
            "        VirtualClient(grouping, group, np.sort(index.members(grouping, group)))\n"
            "        for group in map(int, sampled)",
            "        VirtualClient(\n"
            "            grouping,\n"
            "            group,\n"
            "            np.arange(group, index.user_count, plan.virtual_clients),\n"
            "        )\n"
            "        for group in map(int, sampled)",
        ),
        *STABLE,
    ),
    one(
        9,
        "clients_dealt_by_size",
        (
            ROUNDS,
            "        for unit in units:\n            shares[unit.place % self.worker_count]",
            "        order = sorted(units, key=lambda unit: -len(unit.labels))\n"
            "        for place, unit in enumerate(order):\n"
            "            shares[place % self.worker_count]",
        ),
        *DEAL,
    ),
    Mutant(
        10,
        "divided_by_who_showed_up",
        (
            (
                RUNNING,
                "        return self._sampler.sample(round_index, index)",
                "        clients = self._sampler.sample(round_index, index)\n"
                "        self._present = sum(len(client.users) for client in clients) / 3\n"
                "        return clients",
            ),
            (
                RUNNING,
                MEAN,
                "        present = max(1.0, getattr(self, '_present', 1.0))\n"
                "        mean = (flat * self.plan.normaliser / present).astype(np.float32)\n",
            ),
        ),
        REPLAY,
    ),
    one(
        10,
        "weighted_by_examples",
        (
            ROUNDS,
            "            state = query.accumulate_preprocessed_record(state, record)\n"
            "            norm = tf.sqrt",
            "            weight = tf.cast(stop - start, tf.int64)\n"
            "            record = tf.nest.map_structure(lambda part: part * weight, record)\n"
            "            state = query.accumulate_preprocessed_record(state, record)\n"
            "            norm = tf.sqrt",
        ),
        *AUDIT,
    ),
    one(
        11,
        "fixed_size_priced_as_poisson",
        (
            SAMPLING,
            "    sampled = np.flatnonzero(heads(words, probability))\n",
            "    count = round(probability * plan.virtual_clients)\n"
            "    sampled = np.sort(np.argsort(words)[:count])\n",
        ),
        *COINS,
    ),
    one(
        11,
        "epochs_priced_as_poisson",
        (
            SAMPLING,
            "    sampled = np.flatnonzero(heads(words, probability))\n",
            "    count = round(probability * plan.virtual_clients)\n"
            "    turn = np.arange(round_index * count, (round_index + 1) * count)\n"
            "    sampled = np.sort(turn % plan.virtual_clients)\n",
        ),
        *COINS,
    ),
    one(
        11,
        "coins_come_up_twice_as_often",
        (
            NOISE,
            "    threshold = coin_threshold(probability)\n",
            "    threshold = coin_threshold(min(1.0, 2 * probability))\n",
        ),
        *COINS,
    ),
    # 15, 17: price
    one(
        15,
        "naive_sensitivity",
        (
            f"{PRIVACY}/mechanisms/group_poisson_gaussian.py",
            '    relation_name = "REPLACE_ONE"\n',
            "",
        ),
        f"{PLAN}::test_events_follow_the_rule_table",
    ),
    one(
        15,
        "sampled_then_grouped_priced_at_one_clip",
        (
            f"{PRIVACY}/mechanisms/grouped_users.py",
            "dpe.GaussianDpEvent(self.joint_noise_multiplier / 2)",
            "dpe.GaussianDpEvent(self.joint_noise_multiplier)",
        ),
        f"{PLAN}::test_events_follow_the_rule_table",
    ),
    one(
        17,
        "quantile_bit_not_charged",
        (
            MECHANISM,
            "        return (self.noise_multiplier**-2 + bit**-2) ** -0.5",
            "        return self.noise_multiplier if bit else bit",
        ),
        f"{PLAN}::test_adaptive_clip_is_one_joint_event",
    ),
    one(
        17,
        "clip_from_the_exact_count",
        (
            CLIP,
            '        noised = self._noise.add("below", count, scale)[0] / self._grid\n',
            "        noised = count[0] / self._grid\n",
        ),
        f"{QUERIES}::test_adaptive_clip_depends_on_the_noised_count_not_the_exact_one",
    ),
    one(
        17,
        "clip_moves_and_the_noise_stays",
        (
            CLIP,
            'sums = self._noise.add("update", sums, grid_scale(plan))',
            'sums = self._noise.add("update", sums, grid_scale(plan) * plan.l2_norm_clip / clip)',
        ),
        f"{AUDITING}::test_receipts_of_an_adaptive_clip_move_with_it",
    ),
    # 18: turns and correlated noise
    one(
        18,
        "turns_one_round_too_close",
        (
            SAMPLING,
            "self._last[groups] < self._separation",
            "self._last[groups] < self._separation - 1",
        ),
        f"{SAMPLES}::test_participation_log_refuses_too_often_too_soon_and_twice",
    ),
    one(
        18,
        "order_of_turns_differs_in_each_pass",
        (
            SAMPLING,
            "self._order[turn % self.plan.virtual_clients]",
            "np.roll(self._order, round_index)[turn % self.plan.virtual_clients]",
        ),
        f"{SAMPLES}::test_cyclic_schedule_is_even_and_can_be_entered_anywhere",
    ),
    one(
        18,
        "correlated_noise_begins_again_after_a_resume",
        (KEYED, "            for tag in self.tags:\n", "            for tag in self.tags[:0]:\n"),
        f"{QUERIES}::test_a_resumed_run_equals_the_uninterrupted_one",
    ),
)
"""By family."""
