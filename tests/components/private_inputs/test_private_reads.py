"""No module reads the private root in a way of its own: every access is listed here.

A new access fails a test. Read users through `private_inputs.open_private`; read working state
through `SignedState`; list an access here only if it writes.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path
    for folder in ("components", "pipelines")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "components" / "fedemb" / "pipelines")
)

ALLOWED = {
    # The shared reader.
    ("components/fedemb/runtime/private_inputs.py", "open_private", "context.private(people)"),
    ("components/fedemb/runtime/private_inputs.py", "commitment_to", "context.private(people)"),
    ("components/fedemb/runtime/private_inputs.py", "open_private", "verified_copy"),
    ("components/fedemb/data/client_data.py", "verified_copy", "VerifiedFolder"),
    ("components/fedemb/runtime/private_inputs.py", "_commitment", "FolderCommitment"),
    # Opens a verified folder.
    ("components/fedemb/data/client_data.py", "read", "decode_user"),
    ("components/fedemb/data/client_data.py", "_reader", "ArrayRecordReader"),
    ("components/fedemb/data/client_data.py", "user_keys", "read_index"),
    ("components/fedemb/data/client_data.py", "image_counts", "read_index"),
    ("components/fedemb/data/client_data.py", "user_keys", "read_index"),
    ("components/fedemb/data/client_data.py", "_map", "memory_map"),
    # Working state: claimed in the ledger, and signed from there on.
    (
        "components/fedemb/training/attempt.py",
        "_bound",
        "context.private('train', f'attempt-{inputs.number}')",
    ),
    # Written only; the trainer appends to figures that only the data owner reads.
    ("components/fedemb/training/attempt.py", "_bound", "context.private('diagnostics')"),
    ("components/fedemb/steps/audit_privacy.py", "run", "context.private('audit')"),
    ("components/fedemb/steps/partition_users.py", "run", "context.private_root"),
    # Lists names and deletes.
    # Makes the address.
    ("components/fedemb/runtime/step_context.py", "private", "self.private_root"),
}
"""Module, function, access."""
READERS = {
    "VerifiedFolder",
    "verified_copy",
    "FolderCommitment",
    "ArrayRecordReader",
    "decode_user",
    "read_index",
    "memory_map",
}
"""Calls that read users, or say that they were checked."""


def accesses(source: str) -> set[tuple[str, str]]:
    """Functions of a module and the accesses to private data in each."""
    found: set[tuple[str, str]] = set()

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "private" and isinstance(called, ast.Attribute):
                found.add((function, ast.unparse(node)))
            if name in READERS:
                found.add((function, name))
        if isinstance(node, ast.Attribute) and node.attr == "private_root":
            owner = ast.unparse(node.value)
            if owner in ("self", "context") or owner.endswith(".context"):
                found.add((function, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            walk(child, function)

    walk(ast.parse(source), "")
    return found


def test_every_access_to_private_data_is_listed():
    found = {
        (path.relative_to(ROOT).as_posix(), *access)
        for path in SOURCES
        for access in accesses(path.read_text())
    }
    assert found - ALLOWED == set(), "read users through private_inputs.open_private"
    assert ALLOWED - found == set(), "no longer there: remove it from the list"


@pytest.mark.parametrize(
    "line",
    [
        "local_tree(context.private('evaluation'))",
        "open_store(join(context.private_root, context.run_id, 'users'))",
        "UserStore(VerifiedFolder(path))",
        "FolderCommitment(run_id, 1, value_of_my_own, key)",
        "array_record_module.ArrayRecordReader(str(path))",
        "[decode_user(data) for data in stolen]",
        "self.context.private('users')",
        "self.context.private_root",
    ],
)
def test_a_new_access_is_noticed(line):
    assert accesses(f"def step(context):\n    with_it = {line}\n")


def test_only_verified_folders_can_be_opened(tmp_path):
    from fedemb.data.client_data import GroupIndex, UserStore

    for opened in (UserStore, GroupIndex):
        with pytest.raises(AttributeError):
            opened(tmp_path)
