"""Commands take the names that `fedemb runs` lists, and pages link the files they name."""

from dataclasses import replace

import pytest

from fedemb.errors import InputError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.pages import collect_reports, render_index
from tests.kit.pipeline_runs import honest_run
from tests.kit.run_folder import run_folder


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return honest_run.start(tmp_path_factory.mktemp("released") / "run").until_release()


@pytest.fixture(scope="module")
def folder(released, tmp_path_factory):
    """The run as `fedemb run` leaves it, with its lineage file and its release."""
    made = run_folder(released, tmp_path_factory.mktemp("folder") / "runs")
    (made.public / "lineage.jsonl").write_bytes(released.lineage.read_bytes())
    release = made.root / "releases" / "glyphs" / "1.0"
    release.mkdir(parents=True)
    made.log.touch()
    made.write_state(replace(made.read_state(), closing_lines=[f"release: {release}"]))
    collect_reports(made)
    made.index.write_text(render_index(made))
    return made


def call(capsys, *words) -> str:
    app(args=[str(word) for word in words], standalone_mode=False)
    return capsys.readouterr().out


def test_command_takes_the_name_that_runs_lists(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.root.parents[1])
    name = call(capsys, "runs").splitlines()[1].split()[0]
    assert name == folder.run_id
    by_name = call(capsys, "runs", name)
    assert by_name == call(capsys, "runs", folder.root)
    assert by_name == call(capsys, "runs", name, "--runs", folder.root.parent)
    assert by_name


@pytest.mark.parametrize("command", ["runs", "approve"])
def test_unknown_name_is_answered_with_the_command_that_lists_names(
    command, folder, capsys, monkeypatch
):
    monkeypatch.chdir(folder.root.parents[1])
    key = ("--key", "ada") if command == "approve" else ()
    with pytest.raises(InputError, match=r"No run at tuesday.*`fedemb runs --runs runs` lists"):
        call(capsys, command, "tuesday", *key)
