"""Working state that somebody forged is refused before it is parsed, and nothing is committed."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.errors import SignatureInvalid
from fedemb.keys import LocalKeyStore
from fedemb.keys.trust import Signer
from fedemb.ledger import read_reservation
from fedemb.storage import LocalStore
from fedemb.storage.fencing import FencingToken
from fedemb.training import attempt as training
from fedemb.training import working_state
from fedemb.training.working_state import SignedState
from tests.kit.pipeline_runs.training_run import RUN_ID, prepare


class Killed(BaseException):
    """Where a kill would strike."""


def _raise_killed(*_, **__):
    raise Killed


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """Two rounds are in the checkpoint, a third is on record."""
    run, saved, sound = (
        prepare(tmp_path_factory.mktemp("stopped")),
        [],
        working_state.save_checkpoint,
    )

    def save(*arguments):
        saved.append(1)
        if len(saved) == 3:
            raise Killed
        sound(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(working_state, "save_checkpoint", save)
        with pytest.raises(Killed):
            run.train()
    return run


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """All rounds are over; killed before its last act."""
    run = prepare(tmp_path_factory.mktemp("trained"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "write_signed", _raise_killed)
        with pytest.raises(Killed):
            run.train()
    return run


def _put_back_after(run, backup):
    """The ledger knows the place of a working state, so a copy elsewhere would prove nothing."""
    shutil.copytree(run.root, backup)
    yield run
    shutil.rmtree(run.root)
    shutil.copytree(backup, run.root)


@pytest.fixture
def stopped(stopped_once, tmp_path):
    yield from _put_back_after(stopped_once, tmp_path / "backup")


@pytest.fixture
def trained(trained_once, tmp_path):
    yield from _put_back_after(trained_once, tmp_path / "backup")


def _state(run, *, attempt=1, role="trainer", keys=None, inputs_sha=None):
    """The working state, as anyone who holds a key of that role would write it."""
    context = run.context()
    reservation = read_reservation(context.artifacts.reservation)
    trust = context.ledger.chain.trust
    bound = context.ledger.attempt(reservation).bind.body["inputs_sha"]
    store = LocalStore(run.private / "train" / "attempt-1")
    turn = FencingToken(str(run.root / "turns of others"), "train_dp_fedemb")
    signer = Signer.newest(keys or context.keys, role)
    inputs = SimpleNamespace(
        run_id=RUN_ID, number=attempt, inputs_sha=inputs_sha or bound, reservation=reservation
    )
    return SignedState(store, turn, inputs, signer, trust)


def _weights_doubled(run, name):
    """What is worth forging: the weights of a checkpoint, else any byte at the end."""
    data = _state(run).read(name)
    if name != "checkpoint.npz":
        return data[:-1] + bytes([data[-1] ^ 1])
    path = run.root / "bent.npz"
    path.write_bytes(data)
    with np.load(path) as packed:
        arrays = dict(packed)
    arrays["weights"] *= 2
    np.savez(path, **arrays)
    return path.read_bytes()


def _raw(run):
    return LocalStore(run.private / "train" / "attempt-1")


def _unsigned(run, name):
    _raw(run).write(name, _weights_doubled(run, name))


def _under_the_old_signature(run, name):
    line = _raw(run).read(name).partition(b"\n")[0]
    _raw(run).write(name, line + b"\n" + _weights_doubled(run, name))


def _by_a_stranger(run, name):
    stranger = LocalKeyStore(run.root / "other keys")
    forged = _weights_doubled(run, name)
    _state(run, keys=stranger).write(name, forged)


def _by_another_step(run, name):
    forged = _weights_doubled(run, name)
    _state(run, role="audit").write(name, forged)


def _of_another_attempt(run, name):
    forged = _weights_doubled(run, name)
    _state(run, attempt=2).write(name, forged)


def _of_other_inputs(run, name):
    """As of a run of the same name under another policy, with the same keys and private root."""
    data = _state(run).read(name)
    _state(run, inputs_sha="0" * 64).write(name, data)


def _of_another_name(run, name):
    other = "rounds/000001.record" if name != "rounds/000001.record" else "checkpoint.npz"
    _raw(run).write(name, _raw(run).read(other))


def _without_end(run, name):
    _raw(run).write(name, b"[" * 10_000_000)


FORGERIES = [
    *(_unsigned, _under_the_old_signature, _by_a_stranger, _by_another_step),
    *(_of_another_attempt, _of_other_inputs, _of_another_name, _without_end),
]


def _refused(run):
    with pytest.raises(SignatureInvalid, match="of the working state"):
        run.train()
    context = run.context()
    assert context.ledger.attempt(read_reservation(context.artifacts.reservation)).commit is None
    assert not (run.root / "model" / "model.json").exists()


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize("name", ["checkpoint.npz", "audit.npz", "rounds/000002.record"])
def test_forged_state_of_a_killed_training_is_refused(stopped, forge, name):
    forge(stopped, name)
    _refused(stopped)


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize("name", ["checkpoint.npz", "evidence.json", "rounds/000005.record"])
def test_forged_state_of_a_training_that_is_over_is_refused(trained, forge, name):
    forge(trained, name)
    _refused(trained)


@pytest.mark.long
def test_state_as_it_lay_there_is_taken(stopped):
    """Control for the tests above."""
    assert stopped.train()["rounds_run"] == 6
