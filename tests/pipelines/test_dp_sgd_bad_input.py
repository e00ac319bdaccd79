"""What no classifier can be made of: one sentence, exit code 2, nothing written or charged."""

import pytest

from fedemb.pipelines.cli import main as cli

UNIT = "training.unit_gradient"


BAD = {
    "no view": ([f"{UNIT}.views=0"], "views: input should be greater than or equal to 1, got 0"),
    "more images of a unit than a user may have": (
        [f"{UNIT}.images_per_unit=5"],
        "images_per_unit=5 exceeds the 4 that one user can have",
    ),
    "a microbatch that is never full": (
        [f"{UNIT}.microbatch=4096", "policy.users_lower_bound=4000"],
        "microbatch=4096 exceeds policy.users_lower_bound=4000",
    ),
    "a batch above the population": (
        ["mechanism.units_per_round=10501"],
        "units_per_round=10501 exceeds policy.users_lower_bound=10500",
    ),
    "a chance above one": (["mechanism.sampling_probability=1.5"], "sampling_probability"),
    "no noise": (["mechanism.noise_multiplier=0"], "noise_multiplier"),
    "no clip": (["mechanism.l2_norm_clip=0"], "l2_norm_clip"),
    "one class": (["model.classes=[a]"], "lists 1 classes"),
    "a class twice": (["model.classes=[a, b, a]"], "2 of them distinct"),
    "no class": (["model.classes=[]"], "0 model.classes"),
    "embeddings by DP-SGD": (["task=embedding"], "an embedding has neither"),
    "labels of each user's own": (
        ["data.source.label_scope=user"],
        "labels that mean the same for every user",
    ),
    "images with owners as units": (["policy.unit=image"], "does not match data.source.columns"),
    "units that are grouped": (
        [
            "policy.unit=image",
            "data.source.columns.user_id=null",
            "mechanism={kind: group_poisson_gaussian, rounds: 2, sampling_probability: 0.1, "
            "noise_multiplier: 1.0}",
        ],
        "does not support policy.unit=image",
    ),
    "views of features": (
        ["model.trainable=head", f"{UNIT}.views=2"],
        "computes the features of an image once",
    ),
    "a cap below one run": (
        ["policy.epsilon_cap=0.01"],
        "above policy.epsilon_cap=0.01",
    ),
    "a crop wider than the image": ([f"{UNIT}.crop_padding=28"], "must be below"),
    "a head solved for all layers": (
        [
            "mechanism={kind: least_squares, noise_multiplier: 1.0, units_per_round: 100}",
        ],
        "solves for the head",
    ),
    "no imported net": (
        ["pretraining.kind=import", "pretraining.import_path=/none.keras"],
        "does not exist",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(capsys, tmp_path, name):
    overrides, sentence = BAD[name]
    words = [part for item in overrides for part in ("--set", item)]
    runs = tmp_path / "runs"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", "--config", "dp_sgd_quickstart", "--runs", str(runs), *words])
    shown = capsys.readouterr()
    assert stopped.value.code == 2, shown
    assert sentence in shown.err
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    assert not runs.exists()
