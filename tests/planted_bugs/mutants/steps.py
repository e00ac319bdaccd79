"""Bugs of the steps around a training."""

from __future__ import annotations

from tests.planted_bugs.mutants.places import AUDITING, POISSON, PRIVACY, one

PARTITION = "components/partition_users"
LEDGER = "components/fedemb/ledger"
PARTED = "tests/components/partition_users/test_partition_properties.py"
GATE = "tests/components/gate/test_gate_rules.py"
STEPS = "tests/pipelines/test_steps.py"

MUTANTS = (
    one(
        16,
        "stopped_early_is_not_asked_about",
        (
            "components/fedemb/gate/artifact_rules.py",
            "    if not ran == started == case.plan.rounds:\n",
            "    if not ran == started:\n",
        ),
        f"{GATE}::test_training_that_stopped_early_needs_a_declaration_of_the_policy_owner",
    ),
    one(
        16,
        "evidence_is_not_asked_for",
        (
            "components/fedemb/gate/artifact_rules.py",
            '    if "full" in levels and audit.mechanism is None:\n',
            '    if "complete" in levels and audit.mechanism is None:\n',
        ),
        f"{GATE}::test_release_without_evidence_of_its_mechanism_is_denied",
    ),
    one(
        20,
        "audit_scores_the_public_backbone_twice",
        (
            "components/audit_privacy/audit.py",
            "for folder in (context.artifacts.model, context.artifacts.pretrained)",
            "for folder in (context.artifacts.pretrained, context.artifacts.pretrained)",
        ),
        "tests/components/audit_privacy/test_audit_run.py::"
        "test_a_model_that_memorised_its_users_is_found",
    ),
    # Who trains
    one(
        16,
        "unreserved_blocks_of_a_cohort_train",
        (
            f"{PARTITION}/prepare.py",
            "    elif not held_out and not assigner.may_train(user_key, cohort):\n",
            "    elif not held_out and not cohort and not assigner.may_train(user_key, None):\n",
        ),
        f"{PARTED}::test_only_users_of_reserved_blocks_of_a_cohort_train",
    ),
    one(
        8,
        "user_of_two_cohorts_trains_in_the_first",
        (
            f"{PARTITION}/prepare.py",
            "    if cohort == SEVERAL_COHORTS:",
            "    if cohort == SEVERAL_COHORTS and not cohorts:",
        ),
        f"{PARTED}::test_user_of_several_cohorts_goes_nowhere",
    ),
    one(
        8,
        "id_written_as_a_decimal_is_another_user",
        (
            "components/fedemb/data/identity.py",
            "    if whole := _WHOLE.fullmatch(text):\n",
            "    if whole := _WHOLE.fullmatch(text) and None:\n",
        ),
        "tests/components/partition_users/test_partition_ids.py::"
        "test_whole_and_decimal_ids_of_two_csv_files_are_one_user",
    ),
    one(
        8,
        "id_that_lost_digits_is_taken",
        (
            "components/fedemb/data/identity.py",
            "        if not abs(value) < limit:",
            "        if not abs(value) < math.inf:",
        ),
        "tests/components/partition_users/test_partition_ids.py::"
        "test_decimal_ids_that_lost_digits_are_left_out_and_refused_before_a_run",
    ),
    one(
        8,
        "policy_changes_the_rule_it_began_with",
        (
            "components/fedemb/data/hashing.py",
            "        return Hasher(key, self.names)",
            "        return Hasher(key)",
        ),
        "tests/components/partition_users/test_partition_resumed.py::"
        "test_partition_goes_by_the_rule_of_ids_that_the_policy_began_with",
    ),
    one(
        9,
        "users_of_full_groups_spill_into_the_next",
        (
            "components/fedemb/data/hashing.py",
            "                yield (words[:, word] %",
            "                placed = words[:, word] % np.uint64(virtual_clients)\n"
            "                room = -(-len(placed) // virtual_clients)\n"
            "                for row in range(len(placed)):\n"
            "                    while (placed[:row] == placed[row]).sum() >= room:\n"
            "                        placed[row] = (placed[row] + 1) % virtual_clients\n"
            "                yield (placed %",
        ),
        f"{PARTED}::test_removing_a_user_changes_one_group_per_grouping_and_nothing_else",
    ),
    one(
        8,
        "images_of_one_owner_are_units_of_their_own",
        (
            "components/fedemb/config/run.py",
            '        if (policy.unit == "image") != (self.data.source.columns.user_id is None):\n',
            '        if policy.unit == "user" and self.data.source.columns.user_id is None:\n',
        ),
        f"{POISSON}::test_a_unit_that_the_data_or_mechanism_cannot_have_is_refused",
    ),
    # What is charged, and once
    one(
        16,
        "root_key_survives_the_commit",
        (
            f"{LEDGER}/ledger.py",
            "            keys.destroy(reservation_key_name(",
            "            keys.fetch(reservation_key_name(",
        ),
        "tests/components/ledger/test_ledger_lifecycle.py::"
        "test_commit_lowers_to_rounds_started_and_destroys_the_key",
    ),
    one(
        16,
        "second_trainer_writes_the_round_again",
        (
            "components/fedemb/training/round_log.py",
            "            self._store.create(_name(index), self._encode(record))\n",
            "            self._store.write(_name(index), self._encode(record))\n",
        ),
        "tests/components/train_dp_fedemb/test_train_run.py::"
        "test_second_trainer_of_the_same_attempt_is_refused",
    ),
    one(
        16,
        "simulations_are_not_counted",
        (
            f"{LEDGER}/state.py",
            '            if attempt.reserve.body["purpose"] == "simulation"\n',
            '            if attempt.reserve.body["purpose"] == "simulation" and attempt.commit\n',
        ),
        f"{GATE}::test_simulation_on_the_same_users_is_listed",
    ),
    one(
        19,
        "promise_for_changed_data_is_not_checked",
        (
            f"{PRIVACY}/planning/adjacency.py",
            "    return stays and plan.relation is NeighboringRelation.REPLACE_ONE\n",
            "    return plan.relation is NeighboringRelation.REPLACE_ONE\n",
        ),
        f"{GATE}::test_change_of_own_data_is_claimed_only_where_epsilon_holds_for_it",
    ),
    one(
        19,
        "gain_is_over_the_weakest_start",
        (
            "components/fedemb/documents/starts.py",
            "return max(found, key=",
            "return min(found, key=",
        ),
        f"{GATE}::test_gain_is_over_the_best_start_and_not_the_one_that_was_trained_from",
    ),
    one(
        19,
        "gain_is_over_the_start_that_was_trained_from",
        (
            "components/fedemb/documents/starts.py",
            "        return max(found, key=lambda name: found[name].value)",
            '        return "public_backbone"',
        ),
        f"{GATE}::test_gain_is_over_the_best_start_and_not_the_one_that_was_trained_from",
    ),
    one(
        19,
        "starts_that_were_not_measured_are_not_missed",
        (
            "components/fedemb/gate/utility_rules.py",
            "    if utility.measured and case.evidence.utility.version > 1:",
            "    if utility.measured and case.evidence.utility.version > 2:",
        ),
        f"{GATE}::test_start_that_the_configuration_asks_for_is_measured",
    ),
    one(
        4,
        "noise_floor_of_one_weight",
        (
            f"{PRIVACY}/auditing/noise_floor.py",
            "            square = coordinates + share",
            "            square = 1 + share",
        ),
        f"{AUDITING}::test_noise_floor_lies_between_a_run_and_the_same_run_without_noise",
    ),
    one(
        4,
        "noise_floor_trusts_the_data",
        (
            f"{PRIVACY}/auditing/noise_floor.py",
            "max(0.0, length - weight * self.contributions)",
            "length",
        ),
        f"{AUDITING}::test_no_sums_bring_weights_below_the_noise_floor_in_200_runs",
    ),
    one(
        4,
        "utility_and_audit_count_under_retired_keys",
        (
            "components/fedemb/documents/evidence.py",
            "yield document, reported if document in self.unnamed else reserved",
            "yield document, reserved",
        ),
        "tests/components/ledger/test_ledger_rotation.py::"
        "test_what_no_record_names_counts_under_no_key_retired_before_the_report",
    ),
    one(
        4,
        "images_told_apart_anyhow",
        (
            "components/fedemb/ledger/terms.py",
            "        identifiers=identifiers_of(source),\n",
            "",
        ),
        "tests/components/ledger/test_ledger_claim.py::"
        "test_how_images_without_users_are_told_apart_stays_for_life",
    ),
    # Exact figures that leave
    one(
        21,
        "outputs_on_training_images_end_the_audit",
        (
            "components/audit_privacy/audit.py",
            "or not all(np.isfinite(piece).all() for piece in chain(*seen))",
            "",
        ),
        "tests/components/audit_privacy/test_audit_run.py::"
        "test_of_a_model_that_diverged_nothing_private_ends_the_run_or_is_told",
    ),
    one(
        21,
        "raw_figures_in_the_metadata_of_an_artifact",
        (
            "components/train_dp_fedemb/component.py",
            "        model.metadata.update(",
            '        model.metadata.update(norm=card.get("norm"), ',
        ),
        f"{STEPS}::test_metadata_of_artifacts_is_the_golden_one",
    ),
    one(
        21,
        "progress_tells_how_many_took_part",
        (
            "components/fedemb/training/trainer.py",
            "events.ROUND, ended, rounds)",
            "events.ROUND, len(done.sums.clients), rounds)",
        ),
        "tests/components/train_dp_fedemb/test_train_run.py::test_progress_line_is_public",
    ),
)
"""Of who trains, audit, ledger and gate."""
