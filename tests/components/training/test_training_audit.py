"""The audit of a training: a sound one passes, and each way of not running what was priced fails.

`tests/planted_bugs/mutants.toml` has the other ways: there `test_sound_training_passes` fails.
"""

import numpy as np
import pytest

from fedemb.documents.audit import MechanismAudit
from fedemb.privacy import noise, running
from fedemb.privacy.registry import plan_mechanism
from fedemb.steps import train_model
from fedemb.training import trainer, working_state
from tests.kit.pipeline_runs.training_run import (
    HEAD,
    IMAGES,
    TREE,
    Unaudited,
    classifier_config,
    config,
    covariance_config,
    killed_at,
    prepare,
)

CLIPPED = {"mechanism.l2_norm_clip": 0.01}  # every record, so that a longer clip shows in each
TRAINERS = {"dp_fedemb": config(), "dp_sgd": classifier_config(**CLIPPED)}
SOUND = {
    **TRAINERS,
    "averaged": config(**{"training.server": {"ema_decay": 0.8, "momentum": 0.9}}),
    "tree": config(**TREE),
    "images": classifier_config(
        **{
            "policy.unit": "image",
            "data.source.columns.user_id": None,
            "training.unit_gradient.images_per_unit": 1,
        }
    ),
    "images of users": classifier_config(**IMAGES),
    "images of users, head": classifier_config(**IMAGES, **{"model.trainable": "head"}),
    "head": classifier_config(**HEAD),
    "covariance": covariance_config(),
}
"""Settings of every mechanism, and of every way to train."""
QUICK = (*TRAINERS, "tree", "images of users, head")
"""One each of: users in groups, units, noise that rounds share, coins for images."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Makes a run of some settings ready, once."""
    ready = {}

    def of(name):
        if name not in ready:
            root = tmp_path_factory.mktemp("audited") / "run"
            ready[name] = prepare(root, SOUND[name])
        return ready[name]

    return of


@pytest.fixture
def fresh(prepared, tmp_path):
    """A copy of a ready run."""

    def of(name, copy="run"):
        return prepared(name).copy(tmp_path / copy)

    return of


def evidence_of(run):
    return MechanismAudit.model_validate(run.train()["mechanism_audit"])


def failed(run):
    card, plan = run.train(), plan_mechanism(run.config)
    return set(MechanismAudit.model_validate(card["mechanism_audit"]).failed(plan))


@pytest.mark.planted_bug(4)
@pytest.mark.mutation
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in SOUND]
)
def test_sound_training_passes(fresh, name):
    assert failed(fresh(name)) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["tree"])
def test_training_killed_between_its_evidence_and_its_checkpoint_passes(fresh, name):
    """The checkpoint is a round older than the evidence, which resumes from the round's record."""
    run = fresh(name)
    with killed_at(working_state, "save_checkpoint", 3):
        run.train()
    assert failed(run) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_bits_of_a_training_do_not_depend_on_the_audit(fresh, name):
    blind, seen = fresh(name, "blind"), fresh(name, "seen")

    key = b"k" * 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "RoundAudit", Unaudited)
        train_model.run(blind.context(), root_key=key)
    train_model.run(seen.context(), root_key=key)
    files = [(r.root / "model" / "backbone.keras").read_bytes() for r in (blind, seen)]
    lines = [(r.root / "model" / "rounds.jsonl").read_bytes() for r in (blind, seen)]
    assert lines[0] == lines[1]
    assert _weights(files[0]) == _weights(files[1])


def _weights(data):
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("model.weights.h5")


def noise_forgotten_in_the_query(patch):
    patch.setattr(running, "add_rounded_noise", lambda values, key, scale: values)


def _normals_scaled(patch, factor):
    """In the generator that trainer and audit share."""
    sound = noise._box_muller

    def scaled(key, block, out):
        sound(key, block, out)
        out *= factor(out.size)

    patch.setattr(noise, "_box_muller", scaled)


def noise_two_percent_too_small(patch):
    _normals_scaled(patch, lambda size: 0.98)


def noise_left_out_of_the_last_weights(patch):
    _normals_scaled(patch, lambda size: np.where(np.arange(size) < 0.6 * size, 1.0, 1e-3))


@pytest.mark.planted_bug(4)
@pytest.mark.mutation
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (noise_forgotten_in_the_query, "noise_receipt_failed"),
        (noise_two_percent_too_small, "replay_differs"),
        (noise_left_out_of_the_last_weights, "noise_receipt_failed"),
    ],
)
@pytest.mark.parametrize("name", ["dp_fedemb", pytest.param("dp_sgd", marks=pytest.mark.slow)])
def test_training_with_wrong_noise_fails_its_audit(fresh, monkeypatch, damage, code, name):
    damage(monkeypatch)
    assert code in failed(fresh(name))


@pytest.mark.planted_bug(4)
@pytest.mark.mutation
def test_replay_detects_missing_noise_of_head_training(fresh, monkeypatch):
    """A head of few weights: the sum is far longer than its noise."""
    noise_forgotten_in_the_query(monkeypatch)
    assert "noise" in evidence_of(fresh("head")).replay.failed


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["dp_fedemb", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tree", "head"))]
)
def test_trainer_killed_and_resumed_has_the_same_evidence(fresh, name):
    """The figures of the rounds before a kill are kept; none is checked twice."""
    run, killed = fresh(name), fresh(name, "killed")
    whole, rounds = evidence_of(run), run.config.mechanism.rounds
    with killed_at(working_state, "save_checkpoint", rounds - 1):
        killed.train()
    found = evidence_of(killed)
    assert found.failed(plan_mechanism(run.config)) == {}
    assert found == whole
