"""Bugs of DP-SGD."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import POISSON, QUERIES, UNITS, one

SQUARES = "tests/components/privacy/test_least_squares.py"
COVARIANCE = "tests/components/privacy/test_covariance.py"
FEATURES = "tests/components/embedding/test_embedding_feature_cache.py"
IMAGES = "tests/components/privacy/test_capped_image_poisson.py"
BALL = (
    "tests/components/embedding/test_embedding_head_gradient.py::"
    "test_no_record_leaves_the_ball_however_features_and_errors_lie"
)

MUTANTS = (
    one(
        10,
        "padding_contributes",
        (modules.UNIT, "microbatch", "tf.minimum(size, share.real - start)", "tf.constant(size)"),
        UNITS,
    ),
    one(
        9,
        "views_seeded_by_position",
        (modules.UNIT, "_share", "unit.group", "place"),
        UNITS,
    ),
    one(
        10,
        "unit_mean_over_images_it_does_not_have",
        (modules.UNIT, "_share", "1.0 / count", "1.0 / config.images_per_unit"),
        UNITS,
    ),
    one(
        1,
        "microbatch_mean_is_clipped",
        (
            modules.UNIT,
            "add",
            "(part[place] for part in records)",
            "(tf.reduce_mean(p, axis=0) for p in records)",
        ),
        UNITS,
    ),
    one(
        11,
        "units_coins_by_place",
        (
            modules.SAMPLING,
            "sample_units",
            "words, _ = user_words(round_key, index.user_keys)",
            (
                "places = np.arange(len(index.user_keys), dtype=np.uint64)\n"
                "words, _ = user_words(round_key, places)"
            ),
        ),
        POISSON,
    ),
    one(
        11,
        "coins_of_images_by_the_place_of_their_owner",
        (
            modules.SAMPLING,
            "sample_images",
            "user_words(derive(round_key, 'image', str(place)), keys)",
            (
                "user_words(derive(round_key, 'image', str(place)), np.arange(len(keys), "
                "dtype=np.uint64))"
            ),
        ),
        f"{IMAGES}::test_others_move_no_image",
    ),
    one(
        8,
        "image_takes_part_twice",
        (
            modules.SAMPLING,
            "sample_images",
            ("[VirtualClient(place, int(keys[row]), rows[i:i + 1]) for i, row in enumerate(rows)]"),
            (
                "[VirtualClient(place, int(keys[row]), rows[i:i + 1]) for i, row in "
                "enumerate(rows) for _ in range(2)]"
            ),
        ),
        "tests/components/training/test_training_audit.py::"
        "test_sound_training_passes[images of users]",
    ),
    one(
        2,
        "logits_without_lanes",
        (modules.UNIT, "", "_LANES = 16", "_LANES = 1"),
        f"{UNITS}::test_records_have_the_same_bits_at_any_place_whatever_the_number_of_classes",
    ),
    one(
        10,
        "units_divided_by_who_showed_up",
        (
            modules.PER_UNIT_SAMPLING,
            "normalizer",
            "float(self.units_per_round)",
            "float(self.units_per_round) * 1.01",
        ),
        f"{POISSON}::test_the_divisor_is_planned_and_never_who_showed_up",
    ),
    one(
        10,
        "each_view_adds_a_clipped_record",
        (
            modules.UNIT,
            "_clip_and_add",
            (
                "return (query.accumulate_preprocessed_record(state, record), "
                "tf.cast(norm, tf.float32))"
            ),
            (
                "for _ in range(self._config.views - 1):\n"
                "    state = query.accumulate_preprocessed_record(state, record)\n"
                "return (\n"
                "    query.accumulate_preprocessed_record(state, record),\n"
                "    tf.cast(norm, tf.float32),\n"
                ")"
            ),
        ),
        UNITS,
    ),
    one(
        14,
        "classes_are_learned_from_private_labels",
        (
            modules.ASSIGNMENT,
            "assign",
            "self._classes.get(label, -1)",
            "self._classes.setdefault(label, len(self._classes))",
        ),
        "tests/components/partition_users/test_partition_properties.py::"
        "test_classes_of_a_classifier_are_the_public_list_whatever_labels_come",
    ),
    one(
        10,
        "gradients_of_kernels_go_to_other_units",
        (modules.KERNEL_GRADIENTS, "gradients_of_kernels", "inputs", "inputs[::-1]"),
        "tests/components/embedding/test_embedding_kernel_gradients.py",
    ),
    one(
        1,
        "norm_in_half_precision",
        (
            modules.CLIP,
            "ClippedSum.record",
            "ops.sqrt(ops.sum(ops.square(flat)))",
            "ops.cast(ops.sqrt(ops.sum(ops.square(ops.cast(flat, 'bfloat16')))), 'float64')",
        ),
        f"{QUERIES}::test_no_record_contributes_more_than_the_clip",
    ),
    one(
        2,
        "layout_of_a_batch_is_not_probed",
        (modules.VECTORIZED_ROUNDS, "VectorizedRounds", "False", "True"),
        f"{UNITS}::test_a_layout_that_leaks_into_records_is_refused_before_any_unit_is_read",
    ),
    one(
        14,
        "all_layers_move_where_norms_are_declared",
        (modules.TRAINABLE_GROUPS, "trainable_variables", "_is_norm", "lambda path: True"),
        "tests/components/embedding/test_embedding_joined.py::"
        "test_what_trains_is_named_as_for_one_backbone",
    ),
    # Heads in closed form
    one(
        1,
        "bias_left_out_of_the_norm",
        (
            modules.PRODUCT,
            "clipped_product_sum",
            "np.einsum('uif,uif->ui', whole, whole)",
            "np.einsum('uif,uif->ui', whole[..., :-1], whole[..., :-1])",
        ),
        BALL,
    ),
    one(
        1,
        "errors_rounded_up",
        (modules.PRODUCT, "clipped_product_sum", "np.trunc", "np.rint"),
        BALL,
    ),
    one(
        13,
        "a_feature_that_is_no_number_reaches_the_sum",
        (modules.PRODUCT, "clipped_product_sum", "np.isfinite(real)", "np.isfinite(errors) | True"),
        "tests/components/embedding/test_embedding_head_gradient.py::"
        "test_a_feature_that_is_no_number_takes_out_its_unit_and_moves_no_other",
    ),
    one(
        1,
        "no_room_for_several_images",
        (
            modules.PRODUCT,
            "clipped_product_sum",
            "lengths.sum(1) * math.sqrt(classes) if images > 1 else np.zeros(units)",
            "np.zeros(units)",
        ),
        BALL,
    ),
    one(
        7,
        "features_of_other_inputs_are_taken",
        (modules.FEATURE_CACHE, "FeatureCache.__init__", "f'{FOLDER}{inputs_sha}'", "FOLDER"),
        f"{FEATURES}::test_features_of_other_inputs_are_not_taken",
    ),
    one(
        9,
        "features_depend_on_neighbours",
        (
            modules.MICRO_BATCHES,
            "MicroBatches.__init__",
            "not same_bits_anywhere(self._together, tuple(trunk.input_shape[1:]))",
            "False",
        ),
        f"{FEATURES}::"
        "test_backbone_whose_features_depend_on_neighbours_computes_one_image_at_a_time",
    ),
    one(
        6,
        "constants_of_features_may_change_in_training",
        (modules.RELEASED_MODEL, "_changed_constants", "group not in FROZEN", "group"),
        "tests/components/embedding/test_embedding_public_features.py::"
        "test_release_with_other_constants_than_the_public_backbone_is_refused",
    ),
    one(
        9,
        "progress_counts_all_units",
        (
            modules.FEATURE_CACHE,
            "FeatureProgress.__call__",
            "min(95, 5 * int(20 * units / self._planned))",
            "5 * int(20 * units / self._planned)",
        ),
        f"{FEATURES}::test_progress_reveals_nothing_above_the_public_number_of_units",
    ),
    one(
        2,
        "moments_and_labels_have_a_clip_each",
        (
            modules.MOMENT,
            "whole_vectors",
            "math.hypot(1.0, label_weight)",
            "max(1.0, label_weight)",
        ),
        f"{SQUARES}::test_no_unit_moves_the_sum_by_more_than_the_clip",
    ),
    one(
        10,
        "moments_summed_over_images",
        (modules.MOMENT, "whole_vectors", "radius / np.sqrt(count)", "radius"),
        f"{SQUARES}::test_no_unit_moves_the_sum_by_more_than_the_clip",
    ),
    one(
        2,
        "mean_and_covariance_have_a_clip_each",
        (modules.COVARIANCE, "covariance_record", "math.hypot(1.0, mean_weight)", "1.0"),
        f"{COVARIANCE}::test_no_user_moves_the_sum_by_more_than_the_clip",
    ),
    one(
        2,
        "covariance_rounded_to_the_nearest",
        (
            modules.COVARIANCE,
            "covariance_record",
            "np.trunc(record * radius)",
            "np.rint(record * radius)",
        ),
        f"{COVARIANCE}::test_rounding_to_a_coarse_grid_leaves_no_record_outside_the_ball",
    ),
    one(
        2,
        "covariance_is_not_clipped",
        (modules.COVARIANCE, "covariance_record", "max(covariance_norm, norm)", "covariance_norm"),
        f"{COVARIANCE}::test_no_user_moves_the_sum_by_more_than_the_clip",
    ),
    one(
        2,
        "features_are_not_clipped",
        (
            modules.COVARIANCE,
            "covariance_record",
            "np.maximum(feature_norm, length)",
            "feature_norm",
        ),
        f"{COVARIANCE}::test_no_user_moves_the_sum_by_more_than_the_clip",
    ),
    # Who takes part
    one(
        11,
        "probability_is_one_over_the_batches",
        (
            modules.POISSON_GAUSSIAN,
            "round_event",
            "return dpe.PoissonSampledDpEvent(self.sampling_probability, gaussian)",
            (
                "batches = int(1 / self.sampling_probability) + 1\n"
                "return dpe.PoissonSampledDpEvent(1 / batches, gaussian)"
            ),
        ),
        f"{POISSON}::test_published_prices",
    ),
    one(
        11,
        "shuffled_batches_priced_as_poisson",
        (
            modules.SAMPLING,
            "sample_units",
            "return single_units(np.flatnonzero(heads(words, probability)), index)",
            (
                "count = round(probability * len(words))\n"
                "return single_units(np.sort(np.argsort(words)[:count]), index)"
            ),
        ),
        f"{POISSON}::test_coins_are_independent_and_of_the_planned_chance",
    ),
)
"""Of units, heads and features."""
