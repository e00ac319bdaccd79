"""Bugs of DP-FedEmb."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import AUDIT, one

TESTS = "tests/components/embedding/test_embedding_rounds.py"
CROSSING = f"{TESTS}::test_head_and_slots_of_a_client_do_not_reach_the_next_one_or_the_next_round"
SPREAD = f"{TESTS}::test_sum_is_the_same_bits_for_any_spread_over_workers_and_slabs"
IMPORTS = "tests/components/public_backbone/test_applications.py"

MUTANTS = (
    one(
        14,
        "weights_of_one_client_reach_the_next",
        (
            modules.LOCAL,
            "start",
            "variable.assign(value)",
            "variable.assign(value if variable is self.head else (value + variable) / 2)",
        ),
        SPREAD,
    ),
    one(
        14,
        "momentum_of_one_client_moves_the_next",
        (
            modules.LOCAL,
            "start",
            "tf.zeros_like(value)",
            "tf.zeros_like(value) if variable is self.head else slot",
        ),
        CROSSING,
    ),
    one(
        14,
        "labels_number_rows_of_everybody_s_head",
        (
            modules.CLIENT_DRAWS,
            "local_rows",
            "np.argsort(np.argsort(first)).astype(np.int32)[inverse]",
            "(labels % len(first)).astype(np.int32)",
        ),
        f"{TESTS}::test_labels_mean_nothing_outside_their_client",
    ),
    one(
        9,
        "clients_seeded_by_their_place",
        (modules.ROUNDS, "_data", "client.group", "client.worker_key"),
        SPREAD,
    ),
    one(
        11,
        "coins_for_groups_that_hold_somebody",
        (
            modules.SAMPLING,
            "sample_groups",
            "sampled = np.flatnonzero(heads(words, probability))",
            (
                "every = range(plan.virtual_clients)\n"
                "full = [group for group in every if len(index.members(grouping, group))]\n"
                "sampled = np.array(full, np.int64)[heads(words[:len(full)], probability)]"
            ),
        ),
        "tests/components/privacy/test_privacy_sampling.py::"
        "test_coins_are_tossed_for_empty_virtual_clients_too",
    ),
    one(
        1,
        "first_tensor_is_clipped_apart_from_the_rest",
        (
            modules.ROUNDS,
            "body",
            "record = query.preprocess_record(parameters, update)",
            (
                "rest = query.preprocess_record(parameters, update[1:])\n"
                "record = query.preprocess_record(parameters, update[:1])\n"
                "record = (tf.concat([record[0], rest[0]], axis=0), *record[1:])"
            ),
        ),
        f"{TESTS}::test_clipped_sum_equals_a_straightforward_reference",
    ),
    one(
        10,
        "step_of_the_server_grows_with_who_took_part",
        (
            modules.LOOP,
            "run_rounds",
            "state = function.advance(server, state, output.mean)",
            (
                "grown = output.mean * (1 + len(sums.clients) / 1000)\n"
                "state = function.advance(server, state, grown)"
            ),
        ),
        *AUDIT,
    ),
    one(
        4,
        "average_of_weights_without_noise",
        (
            modules.LOOP,
            "run_rounds",
            "state = function.advance(server, state, output.mean)",
            (
                "before = state.average\n"
                "state = function.advance(server, state, output.mean)\n"
                "state.average[:] = before"
            ),
        ),
        "tests/components/training/test_training_audit.py::test_sound_training_passes[averaged]",
    ),
    one(
        14,
        "imported_network_may_mix_the_images_of_a_batch",
        (
            modules.IMPORTED,
            "_check_apart",
            "any(np.abs(found - alone).max() > 1e-3 * np.abs(alone).max() for found in along)",
            "False",
        ),
        f"{IMPORTS}::test_attention_between_images_is_refused",
    ),
    one(
        14,
        "imported_network_without_finite_outputs_is_not_checked",
        (
            modules.IMPORTED,
            "_check_apart",
            "not all(np.isfinite(found).all() for found in (alone, *along))",
            "False",
        ),
        f"{IMPORTS}::test_outputs_that_are_not_finite_cannot_be_checked",
    ),
)
"""Of clients, heads and their sum."""
