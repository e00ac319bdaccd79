"""Bugs of the steps around a training."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import POISSON, one

PARTED = "tests/components/partition_users/test_partition_properties.py"
GATE = "tests/components/gate/test_gate_rules.py"
STEPS = "tests/pipelines/test_steps.py"
INPUTS = "tests/components/private_inputs/test_private_inputs.py"


DEADLINE = "tests/components/gate/test_gate_approval_deadline.py"

FEATURES = "tests/components/embedding/test_embedding_feature_cache.py"
KEPT = "tests/components/training/test_kept_features.py"

MUTANTS = (
    one(
        7,
        "features_of_other_images_are_taken",
        (
            "fedemb.training.feature_caches",
            "FeatureCaches.open",
            "['features/1', self._inputs_sha, trunk_digest(trunk), images, rows.__name__]",
            "['features/1', self._inputs_sha, trunk_digest(trunk), rows.__name__]",
        ),
        f"{FEATURES}::test_other_inputs_of_features_have_another_cache",
    ),
    one(
        7,
        "features_of_another_trunk_are_taken",
        (
            "fedemb.training.feature_caches",
            "trunk_digest",
            "digest.update(np.ascontiguousarray(values).tobytes())",
            "None",
        ),
        f"{FEATURES}::test_other_inputs_of_features_have_another_cache",
    ),
    one(
        4,
        "kept_features_are_not_verified",
        (
            "fedemb.training.attempt",
            "_bound",
            "FeatureCaches(store, inputs.inputs_sha)",
            "FeatureCaches(store._store, inputs.inputs_sha)",
        ),
        f"{KEPT}::test_features_that_the_training_did_not_write_are_refused",
    ),
    one(
        7,
        "kept_features_are_not_deleted",
        ("fedemb.training.attempt", "run_attempt", "attempt.features.delete()", "None"),
        f"{KEPT}::test_training_killed_while_it_computes_features_resumes_to_the_same_bits",
    ),
    one(
        19,
        "approvals_after_the_deadline_count",
        (
            modules.LEDGER_STATE,
            "LedgerState.approvals_of",
            "until is None or datetime.fromisoformat(record.time) <= until",
            "True",
        ),
        f"{DEADLINE}::test_approval_after_the_deadline_never_counts",
    ),
    one(
        19,
        "deadline_of_approvals_never_ends",
        (
            modules.REPORT_RULES,
            "_overdue",
            "deadline is not None and not case.now <= deadline",
            "False",
        ),
        f"{DEADLINE}::test_deadline_turns_waiting_into_refused",
    ),
    one(
        19,
        "approvers_do_not_sign_the_deadline",
        (
            modules.PRIVACY_REPORT,
            "_release_terms",
            "config.release.approval_hours",
            "None",
        ),
        "tests/components/gate/test_gate_approvals.py::"
        "test_terms_of_the_release_are_those_that_were_approved",
    ),
    one(
        16,
        "stopped_early_is_not_asked_about",
        (
            modules.RECORD_RULES,
            "stopped_early",
            "ran == started == planned.rounds",
            "ran == started",
        ),
        f"{GATE}::test_training_that_stopped_early_needs_a_declaration_of_the_policy_owner",
    ),
    one(
        16,
        "evidence_is_not_asked_for",
        (modules.MODEL_RULES, "_full_audit", "'full'", "'complete'"),
        f"{GATE}::test_release_without_evidence_of_its_mechanism_is_denied",
    ),
    one(
        20,
        "audit_scores_the_public_backbone_twice",
        (
            modules.AUDIT_STEP,
            "_attack_real_users",
            "context.artifacts.model",
            "context.artifacts.pretrained",
        ),
        "tests/components/audit_privacy/test_audit_run.py::"
        "test_a_model_that_memorised_its_users_is_found",
    ),
    one(
        21,
        "people_are_not_compared_with_the_ledger",
        (
            modules.VERIFIED_FOLDER,
            "verified_copy",
            "commit_to_people(commitment.key, *of_people) != commitment.value",
            "not commit_to_people(commitment.key, *of_people)",
        ),
        f"{INPUTS}::test_replaced_evaluation_people_are_neither_read_nor_counted"
        "[evaluate-training_users]",
    ),
    one(
        21,
        "people_are_read_where_they_can_be_swapped_after_their_check",
        (
            modules.VERIFIED_FOLDER,
            "verified_copy",
            "VerifiedFolder(copy)",
            "VerifiedFolder(source)",
        ),
        f"{INPUTS}::test_evaluation_and_audit_use_nothing_but_what_was_compared[evaluate]",
    ),
    one(
        21,
        "people_are_compared_with_the_manifest_beside_them",
        (
            modules.PRIVATE_INPUTS,
            "_commitment",
            "bind and bind.content(BindRecord).commitments.get(people)",
            "commitment_to(context, people, number)",
        ),
        f"{INPUTS}::test_replaced_evaluation_people_are_neither_read_nor_counted"
        "[evaluate-other_people]",
    ),
    one(
        21,
        "people_are_compared_after_the_evaluation_is_counted",
        (
            modules.EVALUATE,
            "run",
            "folder = stack.enter_context(open_private(context, 'evaluation'))",
            (
                "evaluation = context.ledger.record_evaluation(\n"
                "    run_id, model.weights_sha, signer\n"
                ")\n"
                "folder = stack.enter_context(open_private(context, 'evaluation'))"
            ),
        ),
        f"{INPUTS}::test_replaced_evaluation_people_are_neither_read_nor_counted"
        "[evaluate-one_byte]",
    ),
    # Who trains
    one(
        16,
        "unreserved_blocks_of_a_cohort_train",
        (
            modules.PREPARE,
            "settle",
            "not held_out and (not assigner.may_train(user_key, cohort))",
            "not held_out and (not cohort) and (not assigner.may_train(user_key, None))",
        ),
        f"{PARTED}::test_only_users_of_reserved_blocks_of_a_cohort_train",
    ),
    one(
        8,
        "user_of_two_cohorts_trains_in_the_first",
        (
            modules.PREPARE,
            "settle",
            "cohort == SEVERAL_COHORTS",
            "cohort == SEVERAL_COHORTS and (not cohorts)",
        ),
        f"{PARTED}::test_user_of_several_cohorts_goes_nowhere",
    ),
    one(
        8,
        "id_written_as_a_decimal_is_another_user",
        (
            modules.IDENTITY,
            "_number_text",
            "_WHOLE.fullmatch(text)",
            "_WHOLE.fullmatch(text) and None",
        ),
        "tests/components/partition_users/test_partition_ids.py::"
        "test_whole_and_decimal_ids_of_two_csv_files_are_one_user",
    ),
    one(
        8,
        "id_that_lost_digits_is_taken",
        (modules.IDENTITY, "_number_text", "limit", "math.inf"),
        "tests/components/partition_users/test_partition_ids.py::"
        "test_decimal_ids_that_lost_digits_are_left_out_and_refused_before_a_run",
    ),
    one(
        8,
        "sample_of_a_tar_with_two_ids_is_taken",
        (modules.WEBDATASET, "_values", "sample.reject('values_differ', sample.key)", "pass"),
        "tests/components/data/test_webdataset.py::"
        "test_odd_members_are_counted_one_by_one_and_good_ones_are_used",
    ),
    one(
        8,
        "shard_that_braces_name_may_be_missing",
        (modules.SOURCE_PARTS, "find_files", "place.missing(set(names))", "()"),
        "tests/components/data/test_webdataset.py::"
        "test_shard_that_braces_name_and_that_is_missing_is_refused",
    ),
    one(
        8,
        "rows_in_an_open_quote_are_not_counted",
        (
            modules.SOURCES,
            "_read_csv",
            "odd.extend([BadRecord.of('line_not_a_row', row)] * lines_of(row))",
            "pass",
        ),
        "tests/pipelines/test_tables_of_others.py::"
        "test_rows_in_a_quote_that_is_not_closed_are_counted_one_by_one",
    ),
    one(
        9,
        "users_of_full_groups_spill_into_the_next",
        (
            modules.HASHING,
            "groups",
            "yield (words[:, word] % np.uint64(virtual_clients)).astype(np.uint32)",
            (
                "placed = words[:, word] % np.uint64(virtual_clients)\n"
                "room = -(-len(placed) // virtual_clients)\n"
                "for row in range(len(placed)):\n"
                "    while (placed[:row] == placed[row]).sum() >= room:\n"
                "        placed[row] = (placed[row] + 1) % virtual_clients\n"
                "yield (placed % np.uint64(virtual_clients)).astype(np.uint32)"
            ),
        ),
        f"{PARTED}::test_removing_a_user_changes_one_group_per_grouping_and_nothing_else",
    ),
    one(
        8,
        "images_of_one_owner_are_units_of_their_own",
        (
            modules.RUN_CONFIG,
            "_no_contradictions",
            "(policy.unit == 'image') != (self.data.source.columns.user_id is None)",
            "policy.unit == 'user' and self.data.source.columns.user_id is None",
        ),
        f"{POISSON}::test_a_unit_that_the_data_or_mechanism_cannot_have_is_refused",
    ),
    # What is charged, and once
    one(
        16,
        "root_key_survives_the_commit",
        (modules.LEDGER, "commit", "keys.destroy", "keys.fetch"),
        "tests/components/ledger/test_ledger_lifecycle.py::"
        "test_commit_lowers_to_rounds_started_and_destroys_the_key",
    ),
    one(
        16,
        "second_trainer_writes_the_round_again",
        (modules.ROUND_LOG, "commit", "self._store.create", "self._store.write"),
        "tests/components/train_dp_fedemb/test_train_run.py::"
        "test_second_trainer_of_the_same_attempt_is_refused",
    ),
    one(
        16,
        "external_charge_is_left_out_of_the_sum",
        (
            modules.LEDGER_STATE,
            "LedgerState.charges",
            "[*runs, *self.external_charges(block)]",
            "runs",
        ),
        "tests/components/ledger/test_ledger_external.py::"
        "test_cumulative_epsilon_includes_every_form_of_external_charge",
    ),
    one(
        16,
        "external_charge_does_not_count_at_the_gate",
        (
            modules.LEDGER_STATE,
            "LedgerState.charges",
            "[*runs, *self.external_charges(block)]",
            "runs",
        ),
        "tests/components/gate/test_gate_external_charge.py::"
        "test_gate_denies_a_run_whose_block_passed_the_cap_by_a_charge",
    ),
    one(
        16,
        "delta_of_an_external_charge_is_free",
        (
            modules.LEDGER_BUDGET,
            "spent",
            "delta - math.fsum((item.delta for item in charges))",
            "delta",
        ),
        "tests/components/ledger/test_ledger_external.py::"
        "test_cumulative_epsilon_includes_every_form_of_external_charge",
    ),
    one(
        16,
        "simulations_are_not_counted",
        (
            modules.LEDGER_STATE,
            "simulations",
            (
                "attempt.reserved.purpose == 'simulation' and "
                "attempt.reserve.sequence < before and (not attempt.void)"
            ),
            (
                "attempt.reserved.purpose == 'simulation' and attempt.commit and "
                "(attempt.reserve.sequence < before) and (not attempt.void)"
            ),
        ),
        f"{GATE}::test_simulation_on_the_same_users_is_listed",
    ),
    one(
        19,
        "promise_for_changed_data_is_not_checked",
        (
            modules.ADJACENCY,
            "covers_change_own_data",
            "stays and plan.relation is NeighboringRelation.REPLACE_ONE",
            "plan.relation is NeighboringRelation.REPLACE_ONE",
        ),
        f"{GATE}::test_change_of_own_data_is_claimed_only_where_epsilon_holds_for_it",
    ),
    one(
        19,
        "gain_is_over_the_weakest_start",
        (modules.STARTS, "best_start", "max", "min"),
        f"{GATE}::test_gain_is_over_the_best_start_and_not_the_one_that_was_trained_from",
    ),
    one(
        19,
        "gain_is_over_the_start_that_was_trained_from",
        (
            modules.STARTS,
            "best_start",
            "max(found, key=lambda name: found[name].value)",
            "'public_backbone'",
        ),
        f"{GATE}::test_gain_is_over_the_best_start_and_not_the_one_that_was_trained_from",
    ),
    one(
        19,
        "starts_that_were_not_measured_are_not_missed",
        (
            modules.UTILITY_RULES,
            "utility_stale",
            "set(utility.measured_starts)",
            "set(starts_of(config))",
        ),
        f"{GATE}::test_start_that_the_configuration_asks_for_is_measured",
    ),
    one(
        4,
        "utility_and_audit_count_under_retired_keys",
        (
            modules.EVIDENCE,
            "counting",
            "reported if document in self.unnamed else reserved",
            "reserved",
        ),
        "tests/components/ledger/test_ledger_rotation.py::"
        "test_what_no_record_names_counts_under_no_key_retired_before_the_report",
    ),
    one(
        4,
        "images_told_apart_anyhow",
        (
            modules.LEDGER_TERMS,
            "terms_of",
            (
                "PolicyTerms(epsilon_cap=policy.epsilon_cap, delta=policy.delta, "
                "users_lower_bound=policy.users_lower_bound, "
                "composition=policy.composition, renyi_order=policy.renyi_order, "
                "audit_level=policy.audit_level, "
                "users=UserTerms(user_id_column=source.columns.user_id, "
                "cohort_column=source.columns.cohort, "
                "blocks_per_cohort=partition.blocks_per_cohort, "
                "shared_label_column=source.columns.label if source.label_scope == "
                "'global' else None, "
                "evaluation=partition.evaluation.model_dump(mode='json')), unit=policy.unit, "
                "identifiers=identifiers_of(source), "
                "covers_change_own_data=policy.covers_change_own_data, "
                "unplanned_runs=policy.unplanned_runs, approvals=policy.approvals, "
                "series=series, rollback_anchor_sha=rollback_anchor_sha(policy.policy_id, "
                "config.storage.rollback_anchor))"
            ),
            (
                "PolicyTerms(epsilon_cap=policy.epsilon_cap, delta=policy.delta, "
                "users_lower_bound=policy.users_lower_bound, "
                "composition=policy.composition, renyi_order=policy.renyi_order, "
                "audit_level=policy.audit_level, "
                "users=UserTerms(user_id_column=source.columns.user_id, "
                "cohort_column=source.columns.cohort, "
                "blocks_per_cohort=partition.blocks_per_cohort, "
                "shared_label_column=source.columns.label if source.label_scope == "
                "'global' else None, "
                "evaluation=partition.evaluation.model_dump(mode='json')), unit=policy.unit, "
                "covers_change_own_data=policy.covers_change_own_data, "
                "unplanned_runs=policy.unplanned_runs, approvals=policy.approvals, "
                "series=series, rollback_anchor_sha=rollback_anchor_sha(policy.policy_id, "
                "config.storage.rollback_anchor))"
            ),
        ),
        "tests/components/ledger/test_ledger_claim.py::"
        "test_how_images_without_users_are_told_apart_stays_for_life",
    ),
    # Exact figures that leave
    one(
        21,
        "outputs_on_training_images_end_the_audit",
        (
            modules.AUDIT_STEP,
            "_attack_real_users",
            (
                "min(sizes) < MIN_USERS or not all((np.isfinite(piece).all() for piece "
                "in chain(*seen)))"
            ),
            "min(sizes) < MIN_USERS",
        ),
        "tests/components/audit_privacy/test_audit_run.py::"
        "test_of_a_model_that_diverged_nothing_private_ends_the_run_or_is_told",
    ),
    one(
        21,
        "raw_figures_in_the_metadata_of_an_artifact",
        (
            modules.TRAIN_COMPONENT,
            "train_dp_fedemb",
            (
                "model.metadata.update(weights_sha=card['weights_sha'], "
                "rounds_run=card['rounds_run'])"
            ),
            (
                "model.metadata.update(norm=card.get('norm'), "
                "weights_sha=card['weights_sha'], rounds_run=card['rounds_run'])"
            ),
        ),
        f"{STEPS}::test_metadata_of_artifacts_is_the_golden_one",
    ),
    one(
        21,
        "progress_tells_how_many_took_part",
        (
            modules.TRAINER,
            "_train",
            "_LOG.info(events.ROUND, ended, rounds)",
            "_LOG.info(events.ROUND, len(done.sums.clients), rounds)",
        ),
        "tests/components/train_dp_fedemb/test_train_run.py::test_progress_line_is_public",
    ),
)
"""Of who trains, audit, ledger and gate."""
