"""Records of rounds with correlated noise: one size each, and bound to the rounds before them."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from fedemb.errors import ArtifactError, PlanMismatch, SignatureInvalid
from fedemb.foundation.canonical_json import canonical_json
from fedemb.keys import LocalKeyStore
from fedemb.keys.trust import Signer
from fedemb.ledger import read_reservation
from fedemb.privacy.group_mechanisms import TreeAggregationConfig
from fedemb.privacy.noise import TagChain
from fedemb.privacy.planning import plan
from fedemb.privacy.running import build_mechanism, with_tags
from fedemb.storage import LocalStore, open_store
from fedemb.storage.fencing import FencingToken
from fedemb.training import attempt as training
from fedemb.training import working_state
from fedemb.training.trainer import Trainer
from fedemb.training.working_state import RoundLog, SignedState
from tests.kit.pipeline_runs.training_run import RUN_ID, TREE, config, killed_at, prepare

INPUTS = "0" * 64
ROUNDS = 40


def mechanism():
    section = TreeAggregationConfig(rounds=ROUNDS, clients_per_round=2, noise_multiplier=2.0)
    return build_mechanism(plan(section, virtual_clients=200), b"k" * 32, "run", 1, INPUTS)


def committed(folder, rounds=ROUNDS, seed=0):
    """A log of rounds, and the mechanism after the last one."""
    log, noised = RoundLog(open_store(str(folder))), mechanism()
    random = np.random.default_rng(seed)
    for index in range(rounds):
        output = noised.aggregate(index, random.integers(0, 9, 5))
        log.commit(index, noised, output)
    return log, noised


def record_path(folder, index):
    return folder / "rounds" / f"{index:06d}.record"


def test_record_size_does_not_grow_with_rounds(tmp_path):
    committed(tmp_path)
    sizes = [record_path(tmp_path, index).stat().st_size for index in range(10, ROUNDS)]
    assert max(sizes) - min(sizes) < 32, "only the digits of numbers differ"


def chain_of(log, rounds):
    chain = TagChain()
    for index in range(rounds):
        record = log.read(index)
        chain.append(bytes.fromhex(record.mechanism_state["tag"]))
        chain.check(record.tags_sha)
    return chain


def test_resume_state_can_be_rebuilt_from_the_round_records(tmp_path):
    log, noised = committed(tmp_path, 12)
    chain, last = chain_of(log, 12), log.read(11)
    assert with_tags(last.mechanism_state, chain.tags) == noised.state_to_json()


@pytest.mark.parametrize("moved", [0, 3, 10])
def test_record_of_another_history_is_refused(tmp_path, moved):
    """Also if the record is the first one, and the last record is of its own log."""
    log, _ = committed(tmp_path / "own", 12)
    committed(tmp_path / "other", 12, seed=1)
    shutil.copy(record_path(tmp_path / "other", moved), record_path(tmp_path / "own", moved))
    with pytest.raises(ArtifactError, match="does not follow"):
        chain_of(log, 12)


@pytest.mark.parametrize("change", [b" ", b'{"more":1,', b"x"])
def test_record_with_other_bytes_is_refused(tmp_path, change):
    log, _ = committed(tmp_path, 2)
    path = record_path(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(change + data.removeprefix(b"{" if change.startswith(b"{") else b""))
    with pytest.raises(ArtifactError):
        log.read(1)
    path.write_bytes(data[:-4])
    with pytest.raises(ArtifactError, match="the record of round 1 is damaged"):
        log.read(1)


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """A training killed before round 5; its checkpoint covers four rounds."""
    run, save = prepare(tmp_path_factory.mktemp("killed") / "run", config(**TREE)), Trainer._save

    def early(self, progress):
        if progress.state.rounds <= 4:
            save(self, progress)

    with pytest.MonkeyPatch.context() as patch, killed_at(RoundLog, "commit", 6, after=True):
        patch.setattr(Trainer, "_save", early)
        run.train()
    return run


def _put_back_after(run, backup):
    """The ledger knows the place of a working state, so a copy elsewhere would prove nothing."""
    shutil.copytree(run.root, backup)
    yield run
    shutil.rmtree(run.root)
    shutil.copytree(backup, run.root)


@pytest.fixture
def killed(killed_once, tmp_path):
    yield from _put_back_after(killed_once, tmp_path / "backup")


def with_other_tag(run, index):
    """Signs a record with the tag of other sums, as the trainer would have with other data."""
    store = _state(run)
    name = f"rounds/{index:06d}.record"
    head, _, payload = store.read(name).partition(b"\n\0")
    fields = json.loads(head)
    fields["mechanism_state"]["tag"] = "ab" * 32
    store.write(name, canonical_json(fields) + b"\n\0" + payload)


@pytest.mark.parametrize("index", [4, 5])
def test_resume_refuses_a_record_that_does_not_follow_the_others(killed, index):
    with_other_tag(killed, index)
    with pytest.raises(ArtifactError, match=f"record of round {index} does not follow"):
        killed.train()
    assert not (killed.root / "model" / "model.json").exists()


def test_resume_refuses_a_checkpoint_of_another_history(killed):
    store = _state(killed)
    progress = working_state.load_checkpoint(store)
    progress.mechanism["tags"][1] = "ab" * 32
    working_state.save_checkpoint(store, progress)
    with pytest.raises(ArtifactError, match="record of round 3 does not follow"):
        killed.train()


def test_resume_refuses_a_gap_in_the_records(killed):
    record_path(killed.private / "train" / "attempt-1", 4).unlink()
    with pytest.raises(PlanMismatch, match="round 5 was committed by another trainer"):
        killed.train()


def test_resume_refuses_a_checkpoint_ahead_of_its_records(killed):
    for index in (3, 4, 5):
        record_path(killed.private / "train" / "attempt-1", index).unlink()
    with pytest.raises(ArtifactError, match="record of round 3, which was committed, is gone"):
        killed.train()


@pytest.mark.long
def test_resume_without_a_change_ends_with_a_model(killed):
    """Control for the tests above."""
    assert killed.train()["rounds_run"] == 6


# ---- Working state that somebody forged is refused before it is parsed ----


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """Two rounds are in the checkpoint, a third is on record."""
    run = prepare(tmp_path_factory.mktemp("stopped"))
    with killed_at(working_state, "save_checkpoint", 3):
        run.train()
    return run


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """All rounds are over; killed before its last act."""
    run = prepare(tmp_path_factory.mktemp("trained"))
    with killed_at(training, "write_signed"):
        run.train()
    return run


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
    turn = FencingToken(str(run.root / "turns of others"), "train_model")
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


@pytest.mark.parametrize("forge", FORGERIES)
@pytest.mark.parametrize(
    ("moment", "name"),
    [
        *(("stopped", name) for name in ("checkpoint.npz", "audit.npz", "rounds/000002.record")),
        *(
            ("trained", name)
            for name in ("checkpoint.npz", "evidence.json", "rounds/000005.record")
        ),
    ],
)
def test_forged_state_of_a_training_is_refused(request, moment, forge, name):
    run = request.getfixturevalue(moment)
    forge(run, name)
    with pytest.raises(SignatureInvalid, match="of the working state"):
        run.train()
    context = run.context()
    assert context.ledger.attempt(read_reservation(context.artifacts.reservation)).commit is None
    assert not (run.root / "model" / "model.json").exists()


@pytest.mark.long
def test_unchanged_training_state_is_accepted(stopped):
    """Control for the tests above."""
    assert stopped.train()["rounds_run"] == 6
