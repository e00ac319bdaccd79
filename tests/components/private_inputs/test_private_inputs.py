"""Private folders are read only after they match the commitment in the ledger."""

import ast
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedemb.data import client_data
from fedemb.data.client_data import UserStore
from fedemb.errors import FedEmbError, PlanMismatch, Refused, StorageError
from fedemb.runtime import private_inputs
from fedemb.runtime.private_inputs import open_private
from fedemb.steps import audit_privacy, evaluate_model
from tests.kit.pipeline_runs import training_run
from tests.kit.pipeline_runs.evaluation_run import FinishedRun, config, write_users


@pytest.fixture
def run(copied):
    return copied


def _training_users(run):
    """Figures of people who trained, published as those of people who did not."""
    shutil.rmtree(run.private / "evaluation")
    shutil.copytree(run.private / "users", run.private / "evaluation")


def _other_people(run):
    shutil.rmtree(run.private / "evaluation")
    write_users(run.private / "evaluation", 72, seed=3)


def _one_byte(run):
    shard = next((run.private / "evaluation").glob("*.arrayrecord"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _link_to_training_users(run):
    shutil.rmtree(run.private / "evaluation")
    (run.private / "evaluation").symlink_to(run.private / "users")


each_step = pytest.mark.parametrize(
    "step", [evaluate_model, audit_privacy], ids=lambda step: step.__name__.split(".")[-1]
)
ATTACKS = [_training_users, _other_people, _one_byte, _link_to_training_users]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
@each_step
def test_replaced_held_out_users_are_refused_unread(run, tmp_path, monkeypatch, step, attack):
    """Otherwise a verified release prints figures of training users as those of held-out ones."""
    attack(run)
    if step is evaluate_model:  # the audit first reads the training users, who are genuine
        monkeypatch.setattr(UserStore, "read", lambda *_: pytest.fail("was read"))
    records = len(run.context(config()).ledger.chain.records)
    with pytest.raises(PlanMismatch, match=r"evaluation/ of run run-1 is not the folder"):
        step.run(run.context(config(), tmp_path))
    assert len(run.context(config()).ledger.chain.records) == records
    assert not (tmp_path / "report.json").exists()


@each_step
def test_replaced_training_users_are_refused(run, tmp_path, step):
    """The audit reads them, and the baseline of a simulation trains on them."""
    shutil.rmtree(run.private / "users")
    write_users(run.private / "users", 40, seed=3)
    wanted = config(**{"purpose": "simulation", "evaluation.centralized_baseline": True})
    records = len(run.context(wanted).ledger.chain.records)
    with pytest.raises(PlanMismatch, match=r"users/ of run run-1 is not the folder"):
        step.run(run.context(wanted, tmp_path))
    assert len(run.context(wanted).ledger.chain.records) == records


def test_moved_private_root_with_the_same_users_is_accepted(run):
    context = run.context(config())
    shutil.copytree(run.root / "private", run.root / "moved")
    context.given["private_root"] = str(run.root / "moved")
    shutil.rmtree(run.private)
    with open_private(context, "evaluation") as folder:
        assert len(UserStore(folder)) == 72


def test_users_of_another_run_or_attempt_are_refused(run):
    """Equal folders of two runs have different commitments."""
    run.reserve(config(purpose="simulation"), "run-2")
    (run.root / "private" / "run-2").symlink_to(run.private)
    with open_private(run.context(config(), run_id="run-2"), "users"):
        pass
    other = run.context(config())
    bind = other.ledger.state.attempts["run-2", 1].bind
    other.ledger.state.attempts["run-1", 1].bind = bind
    with pytest.raises(PlanMismatch), open_private(other, "users"):
        pytest.fail("was opened")


@pytest.mark.parametrize("missing", ["bind", "commitment", "attempt", "run"])
def test_without_a_commitment_in_the_ledger_nothing_is_opened(run, missing):
    context = run.context(config(), run_id="run-9" if missing == "run" else "run-1")
    attempt = context.ledger.state.attempts["run-1", 1]
    if missing == "bind":
        attempt.bind = None
    if missing == "commitment":
        del attempt.bind.body["commitments"]["evaluation"]
    number = 2 if missing == "attempt" else None
    opened = open_private(context, "evaluation", attempt=number)
    with pytest.raises(Refused, match="no commitment to evaluation/"), opened:
        pytest.fail("was opened")


def _swapped(run):
    """Renames folders as a writer of the private root can."""
    (run.private / "evaluation").rename(run.private / "mine")
    (run.private / "users").rename(run.private / "evaluation")


def _everything(folder):
    store = UserStore(folder)
    return store.user_keys.tolist(), store.read(np.arange(len(store)))


@pytest.mark.long
@pytest.mark.parametrize("attack", [_swapped, _other_people, _one_byte])
def test_folder_changed_at_any_moment_is_refused_or_the_committed_bytes_are_read(
    finished, tmp_path, monkeypatch, attack
):
    with open_private(finished.context(config()), "evaluation") as folder:
        committed = _everything(folder)
    honest, moments, outcomes = client_data._pieces, iter(()), set()

    def pieces(path):
        next(moments, None)  # before the file is opened
        for piece in honest(path):
            next(moments, None)
            yield piece

    def at(moment, run):
        yield from range(moment)
        attack(run)

    monkeypatch.setattr(client_data, "_pieces", pieces)
    monkeypatch.setattr(client_data, "_PIECE", 4096)
    for moment in range(200):
        root = shutil.copytree(finished.root, tmp_path / str(moment))
        moments = at(moment, FinishedRun(root))
        try:
            with open_private(FinishedRun(root).context(config()), "evaluation") as folder:
                untouched = bool([*moments])  # else it is changed now, after the check
                assert _everything(folder) == committed
                outcomes.add("committed")
        except (PlanMismatch, StorageError):
            untouched = False
            outcomes.add("refused")
        if untouched:
            break
    assert untouched, "more moments than were tried"
    assert outcomes == {"refused", "committed"}


@pytest.fixture(scope="module", params=[training_run.config, training_run.classifier_config])
def ready(request, tmp_path_factory):
    return training_run.prepare(tmp_path_factory.mktemp("ready"), request.param(), users=101)


@pytest.fixture
def hide_folder(monkeypatch):
    """While a step uses people, their folder in the private root is gone."""
    honest = private_inputs.verified_copy

    @contextmanager
    def verified(source, commitment):
        with honest(source, commitment) as folder:
            aside = source.rename(source.with_name("aside"))
            yield folder
            aside.rename(source)

    return lambda: monkeypatch.setattr(private_inputs, "verified_copy", verified)


@pytest.mark.long
def test_training_and_evaluation_read_only_the_verified_copy(ready, tmp_path, hide_folder):
    figures = []
    for name in ("sound", "attacked"):
        run = training_run.ReadyRun(shutil.copytree(ready.root, tmp_path / name), ready.config)
        card = run.train()
        if run.config.task == "classification":
            figures.append(evaluate_model.run(run.context()).body)
        figures.append(card["weights_sha"])
        hide_folder()
    assert figures[: len(figures) // 2] == figures[len(figures) // 2 :]


@each_step
def test_evaluation_and_audit_read_only_the_verified_copy(run, tmp_path, hide_folder, step):
    """Training users were published as held-out users when folders were renamed at this moment."""
    sound = step.run(run.context(config(), tmp_path / "sound"))
    hide_folder()
    assert step.run(run.context(config(), tmp_path / "attacked")) == sound


def test_step_error_takes_precedence_over_the_folder_check(run):
    def step(folder):
        (folder.path / "more").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), open_private(run.context(config()), "users") as folder:
        step(folder)


def test_missing_folder_is_an_error(run, tmp_path):
    shutil.rmtree(run.private / "evaluation")
    with pytest.raises(FedEmbError, match="there is nothing at"):
        evaluate_model.run(run.context(config(), tmp_path))


# ---- No module reads the private root in a way of its own: every access is listed here ----


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
    # Records that the same pass made, before they are written.
    ("components/fedemb/partition/shards.py", "whole", "decode_user"),
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
def test_access_scanner_finds_private_access(line):
    assert accesses(f"def step(context):\n    with_it = {line}\n")


def test_only_verified_folders_can_be_opened(tmp_path):
    from fedemb.data.client_data import GroupIndex, UserStore

    for opened in (UserStore, GroupIndex):
        with pytest.raises(AttributeError):
            opened(tmp_path)
