"""Two runs side by side, from a folder and from an artifact store, whose content is not trusted."""

import json
import shutil
from pathlib import Path

import pytest

from fedemb.documents.classifier import ClassifiedPart, ClassifiedParts, ClassifierReport
from fedemb.documents.fields import Interval
from fedemb.errors import ArtifactError, GateDenied, InputError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.artifact_store import Publisher
from fedemb.pipelines.run.compare import compared_run
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.reports.comparison import _parts as parts
from fedemb.reports.comparison import comparison_page
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder

DENIED = {"exit_code": 3, "failed_step": "gate_release", "error": "GateDenied"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of two runs of one policy: `monday` was released, `tuesday` refused."""
    root = tmp_path_factory.mktemp("runs")
    first = honest_run.start(root / "one").until_release()
    second = honest_run.start(
        root / "two",
        "tuesday",
        policy_root=first.policy_root,
        **{"mechanism.noise_multiplier": 4.0, "release.version": "2.0"},
    ).until_gate()
    start = json.loads(second.utility.read_text())["public_backbone"]
    chance = {"value": 0.2, "low": 0.0, "high": 0.4}
    gained = {**start, "difference": dict.fromkeys(start["difference"], chance)}
    second.rewrite(second.utility, public_backbone=gained)
    second.do_account()
    with pytest.raises(GateDenied):
        second.do_gate()
    run_folder(first, root / "runs")
    run_folder(second, root / "runs", **DENIED)
    return root / "runs"


@pytest.fixture
def store(runs, tmp_path):
    """The same runs in an artifact store."""
    for name in ("monday", "tuesday"):
        run = RunDirectory.open(runs / name)
        Publisher(run, str(tmp_path / "store" / "public")).finish(run.read_state(), lambda *_: None)
    shutil.copytree(runs.parent / "one" / "policy" / "ledger", tmp_path / "store" / "ledger")
    return tmp_path / "store"


def call(capsys, *words) -> str:
    app(args=[str(word) for word in words], standalone_mode=False)
    return capsys.readouterr().out


def rows(text: str) -> dict[str, list[str]]:
    """Label -> cells of each line."""
    cells = (
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.split("\n")
    )
    return {found[0]: found[1:] for found in cells if found}


def test_comparison_shows_what_differs_and_nothing_else(runs, capsys):
    found = rows(call(capsys, "runs", runs, "--compare", "monday", "tuesday"))
    assert found["Headline"] == ["Released", "Refused: no gain over public"]
    assert found["mechanism.noise_multiplier"] == ["2.0", "4.0"]
    assert found["release.version"] == ["1.0", "2.0"]
    assert not [name for name in found if name.startswith(("storage.", "policy.", "data."))]
    assert found["Gain"] == [
        "+20.0 points [+10.0, +30.0]", "+20.0 points [+0.0, +40.0]", "+0.0 points"
    ]  # fmt: skip
    assert float(found["Epsilon of this run"][2]) < 0
    assert found["group north, recall at its own threshold"][2] == "+0.0 points"
    assert found["users, declared lower bound"] == ["20,000", "20,000"]
    assert found["held-out identities"] == ["900", "900"]
    assert found["all steps"] == ["10.0 s", "8.0 s", "-2.0 s"]
    assert list(found).index("plan_privacy") < list(found).index("account_privacy")


@pytest.mark.long
def test_artifact_store_shows_the_same_as_the_folder(runs, store, capsys):
    words = ("--compare", "monday", "tuesday")
    assert call(capsys, "runs", store, *words) == call(capsys, "runs", runs, *words)
    listed = [set(call(capsys, "runs", place).splitlines()) for place in (store, runs)]
    assert listed[0] == listed[1]


def test_page_has_every_row_of_the_text(runs, tmp_path, capsys):
    page = tmp_path / "comparison.html"
    text = call(capsys, "runs", runs, "--compare", "monday", "tuesday", "--page", page)
    assert f"page: {page}" in text
    for title in ("Figures", "Settings that differ", "Groups", "Public data counts", "Durations"):
        assert f">{title}</h2>" in page.read_text()
    assert "mechanism.noise_multiplier" in page.read_text()


def manifest(store: Path, run_id: str, **changes) -> None:
    path = store / "public" / run_id / "run.json"
    write_bytes(path, json.dumps(json.loads(path.read_text()) | changes).encode())


def test_configuration_that_the_report_does_not_name_is_refused(store, capsys):
    config = json.loads((store / "public" / "monday" / "run.json").read_text())["config"]
    config["mechanism"]["noise_multiplier"] = 9.0
    manifest(store, "monday", config=config)
    with pytest.raises(ArtifactError, match="not the one that its signed privacy report names"):
        call(capsys, "runs", store, "--compare", "monday", "tuesday")
    app(args=["runs", str(store)], standalone_mode=False)
    shown = capsys.readouterr()
    assert "skipped: The published configuration of run monday" in shown.err
    assert "tuesday" in shown.out


def test_document_that_was_changed_after_it_was_published_is_refused(store, capsys):
    path = store / "public" / "monday" / "account_privacy" / "privacy_report"
    write_bytes(path, path.read_bytes().replace(b'"monday"', b'"sunday"'))
    with pytest.raises(ArtifactError, match="was changed after it was published"):
        call(capsys, "runs", store, "--compare", "monday", "tuesday")


@pytest.mark.parametrize("kept", [(), ("gate_release",)])
def test_manifest_alone_makes_no_run_released(store, kept, capsys):
    """Anyone who may write the public root can claim an end; only the ledger has releases."""
    done = dict.fromkeys(("plan_privacy", *kept), 1.0)
    manifest(store, "tuesday", exit_code=0, failed_step=None, seconds=done)
    found = rows(call(capsys, "runs", store, "--compare", "monday", "tuesday"))
    assert found["Headline"][0] == "Released"
    assert "Released" not in found["Headline"][1]


def test_manifest_of_another_place_is_not_followed(store, tmp_path, capsys):
    secret = tmp_path / "store" / "secret.json"
    secret.write_text("{}")
    path = store / "public" / "monday" / "run.json"
    listed = json.loads(path.read_text())["artifacts"]
    row = {"step": "../..", "name": "secret.json", "kind": "Public", "sha256": "0" * 64}
    manifest(store, "monday", artifacts=[*listed, row])
    call(capsys, "runs", store)
    assert not list(store.rglob("published"))


def test_run_without_its_configuration_says_how_to_publish_it_again(store, capsys):
    manifest(store, "monday", config=None)
    with pytest.raises(ArtifactError, match=r"is not the manifest.*--resume monday"):
        call(capsys, "runs", store, "--compare", "monday", "tuesday")
    with pytest.raises(InputError, match="No published run friday"):
        call(capsys, "runs", store, "--compare", "friday", "tuesday")


def test_wrong_words_are_answered(runs, capsys):
    with pytest.raises(InputError, match="got monday twice"):
        call(capsys, "runs", runs, "--compare", "monday", "monday")
    with pytest.raises(InputError, match="--compare"):
        call(capsys, "runs", runs, "--page", "page.html")
    with pytest.raises(InputError, match="Drop --compare or --mlflow"):
        call(capsys, "runs", runs, "--compare", "monday", "tuesday", "--mlflow", runs)


def test_classes_and_groups_of_a_classifier_are_compared():
    figure = Interval(value=0.5, low=0.4, high=0.6)
    part = ClassifiedPart(name="cat", images=9, units=9, top_1=figure, compared=[])
    both = ClassifiedParts(shown=[part], too_small=0)
    report = ClassifierReport.model_construct(by_class=both, by_group=both)
    assert parts(report) == {"class cat, top-1": figure, "group cat, top-1": figure}


def test_comparison_has_no_address_of_a_store(runs):
    sides = [compared_run(RunDirectory.open(runs / name)) for name in ("monday", "tuesday")]
    page = comparison_page(*sides)
    assert str(runs) not in page
    assert parts(None) == {}
