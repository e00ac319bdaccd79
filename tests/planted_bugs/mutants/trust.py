"""Bugs of what is checked before a charge, and of how files of others are read."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import one, several

CHARGE = "tests/components/gate/test_gate_before_charge.py"
BOMBS = "tests/adversary/test_bombs.py"
LARGE = f"{BOMBS}::test_large_file_of_a_bundle_is_refused_small_and_fast"

MUTANTS = (
    one(
        19,
        "run_is_charged_before_it_is_checked",
        (
            modules.RESERVE,
            "run",
            "check_before_charge(config, plan, ledger, run_id=run_id, start=start)",
            (
                "(ledger.reserve(run_id=run_id, attempt=attempt, content={"
                "**charged_content(config, plan), 'plan_sha': plan.digest, "
                "'config_sha': config_digest(config), 'code_sha': code_digest(config), "
                "'input': _bound_input(config, keys, run_id)}), "
                "check_before_charge(config, plan, ledger, run_id=run_id, start=start))"
            ),
        ),
        f"{CHARGE}::test_start_that_is_not_finite_is_not_charged",
    ),
    one(
        19,
        "weights_of_the_start_may_be_infinite",
        (
            modules.MODEL_FILES,
            "_tensors",
            "not np.isfinite(np.asarray(item, np.float64)).all()",
            "np.isnan(np.asarray(item, np.float64)).any()",
        ),
        CHARGE,
    ),
    one(
        19,
        "charged_with_a_start_of_foreign_tensors",
        (modules.DECIDE, "check_before_charge", "tensor_problem(tensors, tensors)", "None"),
        CHARGE,
    ),
    one(
        19,
        "charged_with_a_start_that_cannot_be_read",
        (modules.DECIDE, "check_before_charge", "stored_tensors(*start)", "()"),
        CHARGE,
    ),
    several(
        22,
        "ledger_of_a_bundle_is_read_whole",
        (
            (modules.BUNDLE, "check_origin", "check_sizes(bundle, manifest.body)", ""),
            (
                modules.BUNDLE,
                "ledger_copy",
                "_lines(bundle / LEDGER, size)",
                "(bundle / LEDGER).read_bytes().splitlines()",
            ),
        ),
        (LARGE,),
    ),
    several(
        22,
        "files_of_a_bundle_are_hashed_before_their_sizes_are_compared",
        (
            (modules.BUNDLE, "check_origin", "check_sizes(bundle, manifest.body)", ""),
            (
                modules.BUNDLE,
                "check_files",
                "limited_digest(bundle / name, size)",
                "file_digest(bundle / name)",
            ),
        ),
        (LARGE,),
    ),
    one(
        22,
        "files_of_a_bundle_are_hashed_before_its_signature_is_checked",
        (
            modules.BUNDLE,
            "check_origin",
            "check_sizes(bundle, manifest.body)",
            "check_files(bundle, manifest.body)",
        ),
        LARGE,
    ),
    one(
        22,
        "file_of_a_bundle_may_have_any_size",
        (modules.BUNDLE, "_check_largest", "size > largest", "False"),
        BOMBS,
    ),
    one(
        22,
        "link_in_a_bundle_is_followed",
        (modules.BUNDLE, "check_form", "path.lstat()", "path.stat()"),
        BOMBS,
    ),
    one(
        22,
        "digest_of_a_file_without_end",
        (modules.DIGESTS, "limited_digest", "left < 0", "left < -(1 << 30)"),
        f"{BOMBS}::test_file_that_grows_while_it_is_read_is_read_to_its_first_excess_byte",
    ),
)
"""The public backbone before the charge, and limits of what is read from a bundle."""
