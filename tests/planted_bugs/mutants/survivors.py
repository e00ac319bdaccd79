"""Bugs that survived an independent search once: values far into a range, masked rules, padding."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import one

DISTANT = "tests/components/privacy/test_privacy_distant_values.py"
CODES = "tests/components/gate/test_gate_reason_codes.py"
FEATURES = "tests/components/embedding/test_embedding_frozen_features.py"
SETTLED = "tests/components/partition_users/test_partition_settle.py"

MUTANTS = (
    # Noise and coins
    *(
        one(
            6,
            f"noise_repeats_after_2_to_the_{16 + bits}_values",
            (
                modules.NOISE,
                "_keystream",
                "block.to_bytes(8, 'little')",
                f"(block % {2**bits}).to_bytes(8, 'little')",
            ),
            DISTANT,
        )
        for bits in (4, 8, 16, 20)
    ),
    one(
        6,
        "rounded_noise_repeats_after_a_million_values",
        (
            modules.NOISE,
            "add_rounded_noise.fill",
            "_box_muller(key, start // _BLOCK, noise)",
            "_box_muller(key, start // _BLOCK % 16, noise)",
        ),
        DISTANT,
    ),
    one(
        11,
        "coins_from_the_low_32_bits",
        (
            modules.NOISE,
            "heads",
            "words < np.uint64(threshold)",
            "words % np.uint64(2**32) < np.uint64(threshold >> 32)",
        ),
        DISTANT,
    ),
    one(
        11,
        "coins_of_32_bits",
        (
            modules.NOISE,
            "coins",
            "np.frombuffer(_keystream(key, _COIN, 0, 8 * size), dtype='<u8').astype(np.uint64)",
            (
                "np.frombuffer(_keystream(key, _COIN, 0, 4 * size), dtype='<u4')"
                ".astype(np.uint64) << np.uint64(32)"
            ),
        ),
        DISTANT,
    ),
    one(
        11,
        "coins_of_units_from_the_low_32_bits",
        (
            modules.SAMPLING,
            "user_words",
            "words[:, 0].astype(np.uint64)",
            "words[:, 0].astype(np.uint64) << np.uint64(32)",
        ),
        DISTANT,
    ),
    one(
        7,
        "tag_of_the_first_thousand_entries",
        (
            modules.NOISE,
            "round_tag",
            "digest.update(data.data)",
            "digest.update(data[:1000].data)",
        ),
        DISTANT,
    ),
    one(
        7,
        "tag_of_the_low_words_of_the_sums",
        (
            modules.NOISE,
            "round_tag",
            "digest.update(data.data)",
            "digest.update(data.astype('<i4').data)",
        ),
        DISTANT,
    ),
    one(
        18,
        "ordered_rounds_may_be_repeated",
        (
            modules.RUNNING,
            "Mechanism.aggregate",
            "round_index != self._next_round",
            "round_index > self._next_round",
        ),
        DISTANT,
    ),
    # Planning
    one(
        19,
        "delta_of_a_projection_above_one_over_n",
        (
            modules.PROJECTION,
            "project",
            "delta is None or delta >= 1 / population",
            "delta is None or delta >= 10 / population",
        ),
        DISTANT,
    ),
    one(
        19,
        "delta_of_a_projection_may_be_one_over_n",
        (
            modules.PROJECTION,
            "project",
            "delta >= 1 / population",
            "delta > 1 / population",
        ),
        DISTANT,
    ),
    # Who trains, and on what
    one(
        16,
        "held_out_user_trains_with_the_larger_side",
        (
            modules.PREPARE,
            "settle",
            "if held_out:\n"
            "    counts['dropped_cross_split'] += trained\n"
            "    images, came = held_out, held",
            "if len(held_out) >= len(train):\n"
            "    counts['dropped_cross_split'] += trained\n"
            "    images, came = held_out, held\n"
            "else:\n"
            "    held_out = {}",
        ),
        SETTLED,
    ),
    one(
        8,
        "features_by_the_low_byte_of_the_row",
        (
            modules.FEATURE_CACHE,
            "_users",
            "user.tobytes()",
            "user.astype('uint8').tobytes()",
        ),
        FEATURES,
    ),
    one(
        8,
        "features_of_units_by_the_low_byte_of_the_row",
        (
            modules.FEATURE_CACHE,
            "unit_key",
            "client.users.tobytes()",
            "client.users.astype('uint8').tobytes()",
        ),
        FEATURES,
    ),
    # Gate
    one(
        19,
        "block_over_cap_only_as_of_the_report",
        (
            modules.RECORD_RULES,
            "block_over_cap",
            "(block_table(case.ledger, head)[block], case.ledger.spent(block))",
            "(block_table(case.ledger, head)[block],)",
        ),
        CODES,
    ),
    one(
        19,
        "block_over_cap_only_as_of_now",
        (
            modules.RECORD_RULES,
            "block_over_cap",
            "(block_table(case.ledger, head)[block], case.ledger.spent(block))",
            "(case.ledger.spent(block),)",
        ),
        CODES,
    ),
    one(
        15,
        "relation_of_the_charge_is_not_compared",
        (
            modules.PRIVACY_RULES,
            "relation_differs",
            "case.reservation.relation != case.plan.relation.name",
            "not case.reservation.relation",
        ),
        CODES,
    ),
    one(
        19,
        "understated_epsilon_passes_its_rule",
        (
            modules.PRIVACY_RULES,
            "epsilon_differs",
            "abs(claimed - epsilon) <= 0.01 * epsilon",
            "claimed - epsilon <= 0.01 * epsilon",
        ),
        CODES,
    ),
    one(
        19,
        "event_of_the_charge_is_not_compared",
        (
            modules.PRIVACY_RULES,
            "event_differs",
            "(case.report.accounting, case.reservation, case.evidence.plan.body)",
            "(case.report.accounting, case.evidence.plan.body)",
        ),
        CODES,
    ),
    one(
        15,
        "attack_rates_are_rounded_down",
        (modules.ATTACK_RATES, "rounded_up", "math.ceil", "math.floor"),
        "tests/components/privacy/test_attack_rates.py::test_figures_are_rounded_up_only",
        "tests/components/privacy/test_attack_rates.py::"
        "test_text_shows_no_rate_below_the_exact_one",
    ),
    one(
        15,
        "attack_rates_forget_delta",
        (
            modules.ATTACK_RATES,
            "attack_bound",
            "delta + math.exp(epsilon) * rate",
            "math.exp(epsilon) * rate",
        ),
        "tests/components/privacy/test_attack_rates.py::"
        "test_gaussian_attack_rates_equal_the_closed_form",
    ),
)
