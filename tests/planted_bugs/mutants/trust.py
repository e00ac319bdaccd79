"""Bugs of what is checked before a charge, and of how files of others are read."""

from __future__ import annotations

import ast

from tests.planted_bugs.edits import Edit, path_of
from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import one, several
from tests.planted_bugs.mutation import REPOSITORY, Mutant

CHARGE = "tests/components/gate/test_gate_before_charge.py"
BOMBS = "tests/adversary/test_bombs.py"
LARGE = f"{BOMBS}::test_large_file_of_a_bundle_is_refused_small_and_fast"
CHECKS = ("_problems", "_check_start", "check_before_charge")
"""Functions of `before_charge` whose every refusal is removed in turn."""


def _without_each_check() -> tuple[Mutant, ...]:
    """One bug for each refusal before the charge: the run is charged."""
    tree = ast.parse(path_of(modules.BEFORE_CHARGE, REPOSITORY).read_text())
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name not in CHECKS:
            continue
        refusals = [node for node in ast.walk(function) if _refuses(node)]
        for number, refusal in enumerate(refusals, 1):
            name = f"charged_without_check_{number}_of_{function.name.strip('_')}"
            new = "yield from ()" if isinstance(refusal, ast.Expr) else "pass"
            edit = Edit(modules.BEFORE_CHARGE, function.name, ast.unparse(refusal), new)
            found.append(Mutant(19, name, (edit,), (CHARGE,)))
    return tuple(found)


def _refuses(node: ast.AST) -> bool:
    """Whether a statement yields a problem or raises."""
    yields = isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)
    return yields or isinstance(node, ast.Raise)


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
    *_without_each_check(),
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
"""Every refusal before the charge removed in turn, and limits of what is read from a bundle."""
