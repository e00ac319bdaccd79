"""Units of every algorithm; what fails whatever the photos are fails before the charge."""

import functools

import pytest

from fedemb.errors import ConfigError, Refused
from fedemb.keys import open_key_store
from fedemb.models import inference
from fedemb.privacy import running
from fedemb.privacy.registry import plan_mechanism
from fedemb.release import released
from fedemb.steps import pretrain_public, reserve_budget
from fedemb.training import backend_rounds, heads, trainer
from fedemb.training.rounds import VectorizedRounds
from tests.kit.pipeline_runs.training_run import (
    HEAD,
    IMAGES,
    TREE,
    classifier_config,
    config,
    covariance_config,
    prepare,
)

CONFIGS = {
    "clients": config(),
    "projection": config(**{"model.trainable": "projection"}),
    "averaged": config(**{"training.algorithm": "dp_fedavg"}),
    "tree": config(**TREE),
    "covariance": covariance_config(),
    "units": classifier_config(),
    "images": classifier_config(**IMAGES),
    "head": classifier_config(**HEAD),
}


def _rehearse(settings, root):
    keys = open_key_store(str(root / "keys"))
    pretrain_public.run(settings.backbone_config(), root / "pretrained", keys)
    plan = plan_mechanism(settings)
    start = root / "pretrained" / "backbone.keras"
    backend_rounds.rehearse(settings, plan, start, released.save_for_users)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_algorithm_is_rehearsed_to_its_end(kind, tmp_path):
    _rehearse(CONFIGS[kind], tmp_path)


@pytest.mark.parametrize(
    ("kind", "setting", "alone"),
    [
        ("clients", "training.local.max_examples_per_client", False),
        ("units", "training.unit_gradient.images_per_unit", False),
        ("images", "partition.max_images_per_user", True),
        ("covariance", "partition.max_images_per_user", False),
    ],
)
def test_trainer_loads_as_many_images_as_configured(kind, setting, alone, tmp_path, monkeypatch):
    """An image that is sampled alone must not load its owner's other images."""

    class Stopped(Exception):
        pass

    def loader(*_, max_examples, one_image, **__):
        raise Stopped(max_examples, one_image)

    run = prepare(tmp_path, CONFIGS[kind])
    monkeypatch.setattr(trainer, "ClientLoader", loader)
    with pytest.raises(Stopped) as found:
        run.train()
    assert found.value.args == (functools.reduce(getattr, setting.split("."), run.config), alone)


def _no_memory(*_, **__):
    raise MemoryError("8 GB")


def _refuse(*_):
    raise Refused("Records depend on their place.")


FAULTS = {
    "noise": ("clients", running, "MAX_NORMALS", 1),
    "layout": ("units", VectorizedRounds, "require_exact", _refuse),
    "embeddings": ("clients", backend_rounds, "embed", _no_memory),
    "classes": ("units", backend_rounds, "classify", _no_memory),
    "file": ("head", backend_rounds, "save_backbone", _no_memory),
    "last round": ("head", heads, "certainty_records", _no_memory),
    "temperature": ("head", heads, "solve_temperature", _no_memory),
    "baselines": ("clients", inference, "raw_pixels", _no_memory),
    "SavedModel": ("clients", released, "save_for_serving", _no_memory),
    "photos": ("units", released, "require_parity", _no_memory),
}
SAID = {"noise": "normals", "layout": "depend on their place"}


@pytest.mark.parametrize("name", FAULTS)
def test_run_whose_rehearsal_fails_is_not_charged(name, tmp_path, monkeypatch):
    kind, *fault = FAULTS[name]
    said = SAID.get(name, r"on this device \(MemoryError")
    monkeypatch.setattr(*fault)
    settings = CONFIGS[kind].updated({"purpose": "release"})
    monkeypatch.setattr(reserve_budget, "check_before_charge", lambda *_, **__: None)
    with pytest.raises((ConfigError, Refused), match=rf"{said}.*othing was charged"):
        prepare(tmp_path, settings, rehearse=None)
    records = sorted((tmp_path / "ledger" / settings.policy.policy_id).glob("0*.json"))
    assert len(records) == 1, "only the record of the policy"


def test_projection_of_another_width_is_refused_before_the_charge(tmp_path):
    with pytest.raises(ConfigError, match=r"embedding_dim: 88.*Nothing was charged"):
        _rehearse(covariance_config(**{"model.embedding_dim": 8}), tmp_path)
