"""Bugs of DP-SGD."""

from __future__ import annotations

from tests.planted_bugs.mutants.places import (
    CLIP,
    EMBEDDING,
    POISSON,
    PRIVACY,
    QUERIES,
    SAMPLING,
    UNIT,
    UNITS,
    one,
)

PRODUCT = f"{PRIVACY}/queries/product_sum.py"
MOMENT = f"{PRIVACY}/queries/moment_sum.py"
SQUARES = "tests/components/privacy/test_least_squares.py"
ALLOCATION = "tests/components/privacy/test_random_allocation.py"
IMAGES = "tests/components/privacy/test_capped_image_poisson.py"
BALL = (
    "tests/components/embedding/test_embedding_head_gradient.py::"
    "test_no_record_leaves_the_ball_however_features_and_errors_lie"
)

MUTANTS = (
    one(
        10,
        "padding_contributes",
        (
            UNIT,
            "            real = tf.minimum(size, share.count - start)\n",
            "            real = tf.constant(size)\n",
        ),
        UNITS,
    ),
    one(
        9,
        "views_seeded_by_position",
        (
            UNIT,
            "seed = seed_of(self.seed, round_index, unit.grouping, unit.group)",
            "seed = seed_of(self.seed, round_index, unit.grouping, place)",
        ),
        UNITS,
    ),
    one(
        2,
        "automatic_clip_without_its_floor",
        (
            UNIT,
            "(norm + self._config.automatic_clip)",
            "norm",
        ),
        "tests/components/embedding/test_embedding_unit_gradient.py::"
        "test_automatic_clip_brings_every_record_near_the_clip_by_its_length_and_floor",
    ),
    one(
        10,
        "unit_mean_over_images_it_does_not_have",
        (
            UNIT,
            "            share.weights[place, :count] = 1.0 / count\n",
            "            share.weights[place, :count] = 1.0 / config.images_per_unit\n",
        ),
        UNITS,
    ),
    one(
        1,
        "microbatch_mean_is_clipped",
        (
            UNIT,
            "            update, loss, count = (part[place] for part in records)\n",
            "            update, loss, count = (tf.reduce_mean(p, axis=0) for p in records)\n",
        ),
        UNITS,
    ),
    one(
        11,
        "units_coins_by_place",
        (
            SAMPLING,
            "    words, _ = user_words(round_key, index.user_keys)\n    return single_units(",
            "    places = np.arange(len(index.user_keys), dtype=np.uint64)\n"
            "    words, _ = user_words(round_key, places)\n    return single_units(",
        ),
        POISSON,
    ),
    one(
        11,
        "coins_of_images_by_the_place_of_their_owner",
        (
            SAMPLING,
            'words, _ = user_words(derive(round_key, "image", str(place)), keys)',
            'words, _ = user_words(derive(round_key, "image", str(place)), np.arange(\n'
            "            len(keys), dtype=np.uint64\n        ))",
        ),
        f"{IMAGES}::test_others_move_no_image",
    ),
    one(
        8,
        "image_takes_part_twice",
        (
            SAMPLING,
            "            VirtualClient(place, int(keys[row]), rows[i : i + 1]) "
            "for i, row in enumerate(rows)\n",
            "            VirtualClient(place, int(keys[row]), rows[i : i + 1])\n"
            "            for i, row in enumerate(rows) for _ in range(2)\n",
        ),
        "tests/components/training/test_training_audit.py::"
        "test_sound_training_passes[images of users]",
    ),
    one(
        2,
        "logits_without_lanes",
        (UNIT, "_LANES = 16\n", "_LANES = 1\n"),
        f"{UNITS}::test_records_have_the_same_bits_at_any_place_whatever_the_number_of_classes",
    ),
    one(
        10,
        "units_divided_by_who_showed_up",
        (
            f"{PRIVACY}/mechanisms/units_alone.py",
            "        return float(self.units_per_round)\n",
            "        return float(self.units_per_round) * 1.01\n",
        ),
        f"{POISSON}::test_the_divisor_is_planned_and_never_who_showed_up",
    ),
    one(
        10,
        "each_view_adds_a_clipped_record",
        (
            UNIT,
            "        return query.accumulate_preprocessed_record(state, record), tf",
            "        for _ in range(self._config.views - 1):\n"
            "            state = query.accumulate_preprocessed_record(state, record)\n"
            "        return query.accumulate_preprocessed_record(state, record), tf",
        ),
        UNITS,
    ),
    one(
        14,
        "classes_are_learned_from_private_labels",
        (
            "components/partition_users/assignment.py",
            "self._classes.get(label, -1), user_held",
            "self._classes.setdefault(label, len(self._classes)), user_held",
        ),
        "tests/components/partition_users/test_partition_properties.py::"
        "test_classes_of_a_classifier_are_the_public_list_whatever_labels_come",
    ),
    one(
        10,
        "gradients_of_kernels_go_to_other_units",
        (
            f"{EMBEDDING}/kernel_gradients.py",
            "tf.matmul(inputs, outputs, transpose_a=True)",
            "tf.matmul(inputs[::-1], outputs, transpose_a=True)",
        ),
        "tests/components/embedding/test_embedding_kernel_gradients.py",
    ),
    one(
        1,
        "norm_in_half_precision",
        (
            CLIP,
            "ops.sqrt(ops.sum(ops.square(flat)))",
            "ops.cast(ops.sqrt(ops.sum(ops.square(ops.cast(flat, 'bfloat16')))), 'float64')",
        ),
        f"{QUERIES}::test_no_record_contributes_more_than_the_clip",
    ),
    one(
        2,
        "layout_of_a_batch_is_not_probed",
        (
            f"{EMBEDDING}/side_by_side.py",
            "    _shown = False\n",
            "    _shown = True\n",
        ),
        f"{UNITS}::test_a_layout_that_leaks_into_records_is_refused_before_any_unit_is_read",
    ),
    one(
        14,
        "all_layers_move_where_norms_are_declared",
        (
            f"{EMBEDDING}/backbones/groups.py",
            '        "norm_only": _is_norm,\n',
            '        "norm_only": lambda path: True,\n',
        ),
        "tests/components/embedding/test_embedding_joined.py::"
        "test_what_trains_is_named_as_for_one_backbone",
    ),
    # Heads in closed form
    one(
        1,
        "bias_left_out_of_the_norm",
        (
            PRODUCT,
            '"uif,uif->ui", whole, whole)',
            '"uif,uif->ui", whole[..., :-1], whole[..., :-1])',
        ),
        BALL,
    ),
    one(
        1,
        "errors_rounded_up",
        (PRODUCT, "    truncated = np.trunc(real *", "    truncated = np.rint(real *"),
        BALL,
    ),
    one(
        13,
        "a_feature_that_is_no_number_reaches_the_sum",
        (
            PRODUCT,
            "    finite = np.all(np.isfinite(real), axis",
            "    finite = np.all(np.isfinite(errors) | True, axis",
        ),
        "tests/components/embedding/test_embedding_head_gradient.py::"
        "test_a_feature_that_is_no_number_takes_out_its_unit_and_moves_no_other",
    ),
    one(
        1,
        "no_room_for_several_images",
        (
            PRODUCT,
            "    slack = lengths.sum(1) * math.sqrt(classes) if images > 1 else np.zeros(units)\n",
            "    slack = np.zeros(units)\n",
        ),
        BALL,
    ),
    one(
        7,
        "features_of_other_inputs_are_taken",
        (f"{EMBEDDING}/feature_cache.py", 'f"features/{inputs_sha}"', '"features"'),
        "tests/components/embedding/test_embedding_feature_cache.py::"
        "test_features_of_other_inputs_are_not_taken",
    ),
    one(
        2,
        "moments_and_labels_have_a_clip_each",
        (
            MOMENT,
            "2.0**grid_bits / math.hypot(1.0, label_weight)",
            "2.0**grid_bits / max(1.0, label_weight)",
        ),
        f"{SQUARES}::test_no_unit_moves_the_sum_by_more_than_the_clip",
    ),
    one(
        10,
        "moments_summed_over_images",
        (
            MOMENT,
            "    share = np.where(taken, radius / np.sqrt(count), 0.0)\n",
            "    share = np.where(taken, radius, 0.0)\n",
        ),
        f"{SQUARES}::test_no_unit_moves_the_sum_by_more_than_the_clip",
    ),
    # Who takes part
    one(
        11,
        "probability_is_one_over_the_batches",
        (
            f"{PRIVACY}/mechanisms/poisson_gaussian.py",
            "        return dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)\n",
            "        batches = int(1 / self.sampling_probability) + 1\n"
            "        return dpe.PoissonSampledDpEvent(1 / batches, gaussian)\n",
        ),
        f"{POISSON}::test_published_prices",
    ),
    one(
        11,
        "shuffled_batches_priced_as_poisson",
        (
            SAMPLING,
            "    return single_units(np.flatnonzero(heads(words, probability)), index)\n",
            "    count = round(probability * len(words))\n"
            "    return single_units(np.sort(np.argsort(words)[:count]), index)\n",
        ),
        f"{POISSON}::test_coins_are_independent_and_of_the_planned_chance",
    ),
    one(
        11,
        "units_allotted_by_their_place",
        (
            SAMPLING,
            'derive(self._coin_key, "epoch", str(epoch)), index.user_keys)',
            'derive(self._coin_key, "epoch", str(epoch)), '
            "np.arange(len(index.user_keys), dtype=np.uint64))",
        ),
        f"{ALLOCATION}::test_others_move_nobody",
    ),
    one(
        6,
        "units_allotted_alike_in_each_epoch",
        (
            SAMPLING,
            'derive(self._coin_key, "epoch", str(epoch))',
            'derive(self._coin_key, "epoch")',
        ),
        ALLOCATION,
    ),
)
"""Of units, heads and features."""
