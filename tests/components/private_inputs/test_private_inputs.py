"""Private folders are read only after they match the commitment in the ledger."""

import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.data.client_data import UserStore
from fedemb.errors import FedEmbError, PlanMismatch, Refused, StorageError
from fedemb.runtime.private_inputs import open_private
from fedemb.steps.audit_privacy import audit
from fedemb.steps.evaluate_embeddings import evaluate
from tests.kit.pipeline_runs.evaluation_run import FinishedRun, config, shared_run, write_users


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return shared_run(tmp_path_factory.mktemp)


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "run")
    return FinishedRun(tmp_path / "run")


def _training_users(run):
    """Figures of people who trained, published as those of people who did not."""
    shutil.rmtree(run.private / "evaluation")
    shutil.copytree(run.private / "users", run.private / "evaluation")


def _training_users_renamed(run):
    _training_users(run)
    manifest = run.private / "evaluation" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("users-", "evaluation-"))
    for path in (run.private / "evaluation").glob("users-*"):
        path.rename(path.with_name(path.name.replace("users-", "evaluation-")))


def _other_people(run):
    shutil.rmtree(run.private / "evaluation")
    write_users(run.private / "evaluation", 72, seed=3)


def _one_byte(run):
    shard = next((run.private / "evaluation").glob("*.arrayrecord"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _index_changed(run):
    index = next((run.private / "evaluation").glob("*.parquet"))
    index.write_bytes(index.read_bytes() + b" ")


def _file_added(run):
    (run.private / "evaluation" / "more").write_bytes(b"")


def _link_to_training_users(run):
    shutil.rmtree(run.private / "evaluation")
    (run.private / "evaluation").symlink_to(run.private / "users")


ATTACKS = [
    _training_users,
    _training_users_renamed,
    _other_people,
    _one_byte,
    _index_changed,
    _file_added,
    _link_to_training_users,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
@pytest.mark.parametrize("step", [evaluate, audit], ids=lambda step: step.__name__.split(".")[-1])
def test_replaced_evaluation_people_are_neither_read_nor_counted(
    run, tmp_path, monkeypatch, step, attack
):
    """Otherwise a verified release prints figures of training users as those of held-out ones."""
    attack(run)
    if step is evaluate:  # the audit first reads the training users, who are genuine
        monkeypatch.setattr(UserStore, "read", lambda *_: pytest.fail("was read"))
    records = len(run.context(config()).ledger.chain.records)
    with pytest.raises(PlanMismatch, match=r"evaluation/ of run run-1 is not the folder"):
        step.run(run.context(config(), tmp_path))
    assert len(run.context(config()).ledger.chain.records) == records
    assert not (tmp_path / "report.json").exists()


def test_replaced_training_users_are_not_audited(run, tmp_path):
    shutil.rmtree(run.private / "users")
    write_users(run.private / "users", 40, seed=3)
    with pytest.raises(PlanMismatch, match=r"users/ of run run-1 is not the folder"):
        audit.run(run.context(config(), tmp_path))


def test_replaced_training_users_do_not_train_the_baseline(run, tmp_path):
    shutil.rmtree(run.private / "users")
    write_users(run.private / "users", 40, seed=3)
    wanted = {"purpose": "simulation", "evaluation.centralized_baseline": True}
    records = len(run.context(config()).ledger.chain.records)  # the run is shared with others
    with pytest.raises(PlanMismatch, match=r"users/ of run run-1 is not the folder"):
        evaluate.run(run.context(config(**wanted), tmp_path))
    assert len(run.context(config()).ledger.chain.records) == records


def test_another_private_root_is_read_if_it_holds_the_same_people(run):
    context = run.context(config())
    shutil.copytree(run.root / "private", run.root / "moved")
    context._given["private_root"] = str(run.root / "moved")
    shutil.rmtree(run.private)
    with open_private(context, "evaluation") as folder:
        assert len(UserStore(folder)) == 72


def test_people_of_another_run_or_attempt_are_refused(run):
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


class Moments:
    """Counts the files that a process opens, and acts at one of them."""

    def __init__(self):
        self.count, self.act_at, self.act = 0, 0, None
        sys.addaudithook(self._hear)  # stays for the life of the process

    def _hear(self, event, arguments):
        if event != "open" or self.act is None or "evaluation" not in str(arguments[0]):
            return
        self.count += 1
        if self.count == self.act_at:
            act, self.act = self.act, None
            act()

    def at(self, number, act):
        self.count, self.act_at, self.act = 0, number, act


MOMENTS = Moments()


def _swapped(run):
    """Renames folders as fast as a writer of the private root can."""
    (run.private / "evaluation").rename(run.private / "mine")
    (run.private / "users").rename(run.private / "evaluation")


def _everything(folder):
    store = UserStore(folder)
    return store.user_keys.tolist(), store.read(np.arange(len(store)))


def test_folder_swapped_at_any_moment_is_refused_or_the_committed_bytes_are_read(
    finished, run, tmp_path
):
    with open_private(finished.context(config()), "evaluation") as folder:
        committed = _everything(folder)
    outcomes = []
    for moment in range(1, 40):
        shutil.copytree(finished.private, root := tmp_path / str(moment) / "run-1")
        context = run.context(config())
        context._given["private_root"] = str(root.parent)
        swapped = SimpleNamespace(private=root)
        MOMENTS.at(moment, lambda swapped=swapped: _swapped(swapped))
        try:
            with open_private(context, "evaluation") as folder:
                assert _everything(folder) == committed
                outcomes.append("committed")
        except (PlanMismatch, StorageError):
            outcomes.append("refused")
        if MOMENTS.act is not None:
            break
    assert MOMENTS.act is not None, "more moments than were tried"
    assert {"refused", "committed"} <= set(outcomes)


def test_folder_swapped_after_its_check_changes_no_figure(run, tmp_path, monkeypatch):
    """Training users were published as held-out users when folders were renamed at this moment."""
    sound = evaluate.run(run.context(config(), tmp_path / "sound"))
    honest = UserStore.__init__

    def opens(store, folder):
        if folder.path.name == "evaluation" and not (run.private / "mine").exists():
            _swapped(run)
        honest(store, folder)

    monkeypatch.setattr(UserStore, "__init__", opens)
    swapped = evaluate.run(run.context(config(), tmp_path / "swapped"))
    assert (run.private / "mine").exists()
    assert swapped == sound


def test_an_error_of_the_step_itself_comes_first(run):
    def step(folder):
        (folder.path / "more").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), open_private(run.context(config()), "users") as folder:
        step(folder)


def test_a_missing_folder_is_one_sentence(run, tmp_path):
    shutil.rmtree(run.private / "evaluation")
    with pytest.raises(FedEmbError, match="there is nothing at"):
        evaluate.run(run.context(config(), tmp_path))
