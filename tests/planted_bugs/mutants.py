"""The known bugs as patches to the product, and the tests that must turn red on each."""

from __future__ import annotations

from tests.planted_bugs.mutation import Mutant

_PRIVACY = "components/fedemb/privacy"
_CLIP = f"{_PRIVACY}/queries/clipped_sum.py"
_RUNNING = f"{_PRIVACY}/queries/running.py"
_KEYED = f"{_PRIVACY}/mechanisms/keyed_noise.py"
_NOISE = f"{_PRIVACY}/mechanisms/noise.py"
_SAMPLING = f"{_PRIVACY}/mechanisms/sampling.py"
_MECHANISM = f"{_PRIVACY}/mechanisms/mechanism.py"
_ROUNDS = "components/fedemb/embedding/rounds.py"
_LOOP = "components/fedemb/embedding/round_loop.py"
_UNIT = "components/fedemb/embedding/unit_gradient.py"

_SOUND = "tests/planted_bugs/test_planted_bugs.py::test_the_sound_system_is_green_in_every_layer"
_REPLAY = (f"{_SOUND}[record_replay]",)
_PROBE = (f"{_SOUND}[zero_probe]",)
_AGAIN = (f"{_SOUND}[replay_with_other_data]",)
_COINS = (f"{_SOUND}[coin_chi_square]",)
_QUERIES = "tests/components/privacy/test_privacy_queries.py"
_PLAN = "tests/components/privacy/test_privacy_plan.py"
_POISSON = "tests/components/privacy/test_poisson_gaussian.py"
_UNITS = "tests/components/embedding/test_embedding_unit_gradient.py"
_AUDITING = "tests/components/privacy/test_privacy_auditing.py"
_AUDIT = ("tests/components/training/test_training_audit.py::test_sound_training_passes",)
_DEAL = (
    "tests/components/embedding/test_embedding_rounds.py::"
    "test_one_user_sends_no_other_client_to_another_worker",
)


def _one(number: int, name: str, edit: tuple[str, str, str], *tests: str) -> Mutant:
    return Mutant(number, name, (edit,), tests)


_BOUNDED = "tf.maximum(clip, norm * (1.0 + _CLIP_SLACK))"
_MEAN = "        mean = flat.astype(np.float32)\n"
_RAW = "self._raw / self.plan.normaliser"
_SUMS = "        result, state, event = self.query.get_noised_result("
_KEEP_RAW = (
    _RUNNING,
    _SUMS,
    """        scale = self.l2_norm_clip / 2.0**self.plan.grid_bits
        self._raw = np.asarray(sample_state[0], np.float64) * scale
"""
    + _SUMS,
)

SOUND = Mutant(1, "nothing_planted", (), (*_REPLAY, *_PROBE, *_AGAIN, *_COINS))
"""The control: the copy without a bug must be green."""

MUTANTS = (
    SOUND,
    # 1-3, 13: clipping
    _one(1, "no_clipping", (_CLIP, _BOUNDED, "clip"), *_REPLAY),
    _one(
        2,
        "clip_per_tensor",
        (
            _CLIP,
            "norm = tf.sqrt(tf.reduce_sum(tf.square(flat)))",
            "norm = tf.reduce_max([tf.norm(tf.cast(t, tf.float64)) for t in tensors])",
        ),
        *_REPLAY,
    ),
    _one(
        3,
        "weighted_after_the_clip",
        (
            _CLIP,
            "        return (self._clip(params, record)[0],)",
            "        return (self._clip(params, record)[0] * 3,)",
        ),
        *_REPLAY,
    ),
    Mutant(
        3,
        "clip_the_sum_only",
        (
            (_CLIP, _BOUNDED, "clip"),
            (
                _CLIP,
                "        plan = self._plan\n        if plan.tracks",
                "        plan = self._plan\n        length = float(np.linalg.norm(sums))\n"
                "        most = self._grid * plan.normaliser\n"
                "        sums = (sums * min(1.0, most / max(1.0, length))).astype(np.int64)\n"
                "        if plan.tracks",
            ),
        ),
        _REPLAY,
    ),
    _one(
        13,
        "nan_reaches_the_sum",
        (_CLIP, "finite = tf.math.is_finite(norm)", "finite = tf.constant(True)"),
        f"{_QUERIES}::test_a_non_finite_update_counts_as_zero",
    ),
    _one(
        13,
        "nan_is_mended_and_counts",
        (
            _CLIP,
            "        norm = tf.sqrt(tf.reduce_sum",
            "        flat = tf.where(tf.math.is_finite(flat), flat, tf.ones_like(flat))\n"
            "        norm = tf.sqrt(tf.reduce_sum",
        ),
        f"{_QUERIES}::test_a_non_finite_update_counts_as_zero",
    ),
    # 4-7, 12: noise
    _one(
        4,
        "noise_scaled_as_for_the_mean",
        (
            _KEYED,
            "return plan.noise_multiplier * 2.0**plan.grid_bits",
            "return plan.noise_multiplier * 2.0**plan.grid_bits / plan.normaliser",
        ),
        *_PROBE,
    ),
    _one(
        5,
        "variance_for_deviation",
        (
            _KEYED,
            "return plan.noise_multiplier * 2.0**plan.grid_bits",
            "return plan.noise_multiplier**2 * 2.0**plan.grid_bits",
        ),
        *_PROBE,
    ),
    _one(
        4,
        "noise_3_percent_short",
        (
            _KEYED,
            "return plan.noise_multiplier * 2.0**plan.grid_bits",
            "return 0.97 * plan.noise_multiplier * 2.0**plan.grid_bits",
        ),
        f"{_AUDITING}::test_canaries_of_a_sound_mechanism_measure_the_plan_in_200_runs",
    ),
    _one(
        6,
        "seed_reused_across_rounds",
        (
            _KEYED,
            "return add_rounded_noise(values, tensor_key(self._key, self.tag, name), scale)",
            "return add_rounded_noise(values, self._key, scale)",
        ),
        *_PROBE,
    ),
    _one(
        6,
        "seed_reused_across_processes",
        (
            _KEYED,
            "return add_rounded_noise(values, tensor_key(self._key, self.tag, name), scale)",
            "return add_rounded_noise(values, self.tag and bytes(32), scale)",
        ),
        *_PROBE,
    ),
    _one(
        6,
        "seed_reused_across_entries",
        (
            _NOISE,
            "        _box_muller(key, start // _BLOCK, noise)\n        noise *= scale\n",
            "        _box_muller(key, start // _BLOCK, noise)\n        noise *= scale\n"
            "        noise[1::2] = noise[: 2 * (noise.size // 2) : 2]\n",
        ),
        *_PROBE,
    ),
    _one(
        7,
        "noise_ignores_the_data",
        (_NOISE, "        digest.update(data.data)\n", ""),
        *_AGAIN,
    ),
    _one(
        7,
        "fresh_noise_on_replay",
        (
            _NOISE,
            "    digest = hashlib.sha256()\n    for name in sorted(quantities):",
            "    digest = hashlib.sha256(os.urandom(8))\n    for name in sorted(quantities):",
        ),
        *_AGAIN,
    ),
    _one(
        12,
        "empty_round_is_skipped",
        (
            _CLIP,
            "        elif plan.private:\n",
            "        elif plan.private and sums.any():\n",
        ),
        *_PROBE,
    ),
    # 8-11: grouping, sampling, dividing
    _one(
        8,
        "user_in_two_clients",
        (
            _SAMPLING,
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
        *_REPLAY,
    ),
    _one(
        9,
        "chunks_of_a_sorted_list",
        (
            _SAMPLING,
            "        VirtualClient(grouping, group, np.sort(index.members(grouping, group)))\n"
            "        for group in map(int, sampled)",
            "        VirtualClient(\n"
            "            grouping,\n"
            "            group,\n"
            "            np.arange(group, index.user_count, plan.virtual_clients),\n"
            "        )\n"
            "        for group in map(int, sampled)",
        ),
        *_REPLAY,
    ),
    _one(
        9,
        "clients_dealt_by_size",
        (
            _ROUNDS,
            "    parts = [[c for c in clients if c.place % workers == number] "
            "for number in range(workers)]",
            "    order = sorted(clients, key=lambda c: -len(c.labels))\n"
            "    parts = [order[number::workers] for number in range(workers)]",
        ),
        *_DEAL,
    ),
    Mutant(
        10,
        "divided_by_who_showed_up",
        (
            (
                _RUNNING,
                "        return self._sampler.sample(round_index, index)",
                "        clients = self._sampler.sample(round_index, index)\n"
                "        self._present = sum(len(client.users) for client in clients) / 3\n"
                "        return clients",
            ),
            (
                _RUNNING,
                _MEAN,
                "        present = max(1.0, getattr(self, '_present', 1.0))\n"
                "        mean = (flat * self.plan.normaliser / present).astype(np.float32)\n",
            ),
        ),
        _REPLAY,
    ),
    _one(
        10,
        "weighted_by_examples",
        (
            _ROUNDS,
            "            state = query.accumulate_preprocessed_record(state, record)\n"
            "            norm = tf.sqrt",
            "            weight = tf.cast(stop - start, tf.int64)\n"
            "            record = tf.nest.map_structure(lambda part: part * weight, record)\n"
            "            state = query.accumulate_preprocessed_record(state, record)\n"
            "            norm = tf.sqrt",
        ),
        *_AUDIT,
    ),
    _one(
        11,
        "fixed_size_priced_as_poisson",
        (
            _SAMPLING,
            "    sampled = np.flatnonzero(heads(words, probability))\n",
            "    count = round(probability * plan.virtual_clients)\n"
            "    sampled = np.sort(np.argsort(words)[:count])\n",
        ),
        *_COINS,
    ),
    _one(
        11,
        "epochs_priced_as_poisson",
        (
            _SAMPLING,
            "    sampled = np.flatnonzero(heads(words, probability))\n",
            "    count = round(probability * plan.virtual_clients)\n"
            "    turn = np.arange(round_index * count, (round_index + 1) * count)\n"
            "    sampled = np.sort(turn % plan.virtual_clients)\n",
        ),
        *_COINS,
    ),
    _one(
        11,
        "coins_come_up_twice_as_often",
        (
            _NOISE,
            "    threshold = coin_threshold(probability)\n",
            "    threshold = coin_threshold(min(1.0, 2 * probability))\n",
        ),
        *_COINS,
    ),
    # 15, 17: price
    _one(
        15,
        "naive_sensitivity",
        (
            f"{_PRIVACY}/mechanisms/group_poisson_gaussian.py",
            '    relation_name = "REPLACE_ONE"\n',
            "",
        ),
        f"{_PLAN}::test_events_follow_the_rule_table",
    ),
    _one(
        15,
        "sampled_then_grouped_priced_at_one_clip",
        (
            f"{_PRIVACY}/mechanisms/user_poisson.py",
            "dpe.GaussianDpEvent(self.joint_noise_multiplier / 2)",
            "dpe.GaussianDpEvent(self.joint_noise_multiplier)",
        ),
        f"{_PLAN}::test_events_follow_the_rule_table",
    ),
    _one(
        17,
        "quantile_bit_not_charged",
        (
            _MECHANISM,
            "        return (self.noise_multiplier**-2 + bit**-2) ** -0.5",
            "        return self.noise_multiplier if bit else bit",
        ),
        f"{_PLAN}::test_adaptive_clip_is_one_joint_event",
    ),
    _one(
        17,
        "clip_from_the_exact_count",
        (
            _CLIP,
            '        noised = self._noise.add("below", count, self._stddev * self._grid)\n',
            "        noised = count\n",
        ),
        f"{_QUERIES}::test_adaptive_clip_depends_on_the_noised_count_not_the_exact_one",
    ),
    _one(
        17,
        "clip_moves_and_the_noise_stays",
        (
            _CLIP,
            'sums = self._noise.add("update", sums, grid_scale(plan))',
            'sums = self._noise.add("update", sums, grid_scale(plan) * plan.l2_norm_clip / clip)',
        ),
        f"{_AUDITING}::test_receipts_of_an_adaptive_clip_move_with_it",
    ),
    # What is not what was priced, in the training itself
    _one(
        4,
        "noise_forgotten",
        (
            _CLIP,
            'sums = self._noise.add("update", sums, grid_scale(plan))',
            'self._noise.add("update", sums, grid_scale(plan))',
        ),
        *_PROBE,
    ),
    Mutant(
        4,
        "mean_taken_before_the_noise",
        (_KEEP_RAW, (_RUNNING, _MEAN, f"        mean = ({_RAW}).astype(np.float32)\n")),
        _PROBE,
    ),
    Mutant(
        4,
        "trainer_steps_with_the_raw_mean",
        (
            _KEEP_RAW,
            (
                _LOOP,
                "        state = function.advance(server, state, output.mean)\n",
                "        raw = mechanism._raw / mechanism.plan.normaliser\n"
                "        state = function.advance(server, state, raw.astype('float32'))\n",
            ),
        ),
        _AUDIT,
    ),
    Mutant(
        4,
        "public_digest_of_the_raw_sum",
        (
            _KEEP_RAW,
            (
                _RUNNING,
                "hashlib.sha256(mean.tobytes()).hexdigest()",
                "hashlib.sha256(self._raw.tobytes()).hexdigest()",
            ),
        ),
        _AUDIT,
    ),
    Mutant(
        10,
        "mean_shrunk_by_its_raw_norm",
        (
            _KEEP_RAW,
            (
                _RUNNING,
                _MEAN,
                "        shrink = 1 + np.linalg.norm(self._raw) / self.plan.normaliser\n"
                "        mean = (flat / shrink).astype(np.float32)\n",
            ),
        ),
        _AUDIT,
    ),
    _one(
        16,
        "stops_when_the_raw_loss_is_low",
        (
            _LOOP,
            "        yield Round(index, clip, sums, record, state, seconds)\n",
            "        yield Round(index, clip, sums, record, state, seconds)\n"
            "        if index > 2 and sums.clients[:, 2].mean() < 1e9:\n"
            "            return\n",
        ),
        *_AUDIT,
    ),
    _one(
        1,
        "clip_a_tenth_too_long",
        (_CLIP, "        factor = self._grid / tf", "        factor = 1.1 * self._grid / tf"),
        *_AUDIT,
    ),
    _one(
        16,
        "stopped_early_is_not_asked_about",
        (
            "components/fedemb/gate/artifact_rules.py",
            "    if not ran == started == case.plan.rounds:\n",
            "    if not ran == started:\n",
        ),
        "tests/components/gate/test_gate_rules.py::"
        "test_training_that_stopped_early_needs_a_declaration_of_the_policy_owner",
    ),
    _one(
        16,
        "evidence_is_not_asked_for",
        (
            "components/fedemb/gate/artifact_rules.py",
            '    if "full" in levels and audit.mechanism is None:\n',
            '    if "complete" in levels and audit.mechanism is None:\n',
        ),
        "tests/components/gate/test_gate_rules.py::"
        "test_release_without_evidence_of_its_mechanism_is_denied",
    ),
    _one(
        20,
        "audit_scores_the_public_backbone_twice",
        (
            "components/audit_privacy/audit.py",
            "for folder in (context.artifacts.model, context.artifacts.pretrained)",
            "for folder in (context.artifacts.pretrained, context.artifacts.pretrained)",
        ),
        "tests/components/audit_privacy/test_audit_run.py",
    ),
    # DP-SGD: units
    _one(
        10,
        "padding_contributes",
        (
            _UNIT,
            "            real = tf.minimum(size, share.count - start)\n",
            "            real = tf.constant(size)\n",
        ),
        _UNITS,
    ),
    _one(
        9,
        "views_seeded_by_position",
        (
            _UNIT,
            "seed = seed_of(self.seed, round_index, unit.grouping, unit.group)",
            "seed = seed_of(self.seed, round_index, unit.grouping, place)",
        ),
        _UNITS,
    ),
    _one(
        2,
        "automatic_clip_without_its_floor",
        (
            _UNIT,
            "(norm + self._config.automatic_clip)",
            "norm",
        ),
        _UNITS,
    ),
    _one(
        10,
        "unit_mean_over_images_it_does_not_have",
        (
            _UNIT,
            "            share.weights[place, :count] = 1.0 / count\n",
            "            share.weights[place, :count] = 1.0 / config.images_per_unit\n",
        ),
        _UNITS,
    ),
    _one(
        1,
        "microbatch_mean_is_clipped",
        (
            _UNIT,
            "            update, loss, count = (part[place] for part in records)\n",
            "            update, loss, count = (tf.reduce_mean(p, axis=0) for p in records)\n",
        ),
        _UNITS,
    ),
    _one(
        11,
        "units_coins_by_place",
        (
            _SAMPLING,
            "    words, _ = user_words(round_key, keys)\n    rows = np.flatnonzero(heads(words, "
            "probability)).astype(np.int64)\n    return [VirtualClient(0, int(keys[row])",
            "    words, _ = user_words(round_key, np.arange(len(keys), dtype=np.uint64))\n"
            "    rows = np.flatnonzero(heads(words, probability)).astype(np.int64)\n"
            "    return [VirtualClient(0, int(keys[row])",
        ),
        _POISSON,
    ),
    _one(
        10,
        "units_divided_by_who_showed_up",
        (
            f"{_PRIVACY}/mechanisms/poisson_gaussian.py",
            "        return float(self.units_per_round)\n",
            "        return float(self.units_per_round) * 1.01\n",
        ),
        f"{_POISSON}::test_the_divisor_is_planned_and_never_who_showed_up",
    ),
)
