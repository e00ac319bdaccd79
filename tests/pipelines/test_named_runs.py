"""Commands take the names that `fedemb runs` lists, and pages link the files they name."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from fedemb.errors import InputError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.index import render_index
from fedemb.pipelines.run.report_pages import collect_reports
from fedemb.reports.report import link
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


@pytest.mark.parametrize("command", ["report", "lineage"])
def test_command_takes_the_name_that_runs_lists(command, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.root.parents[1])
    name = call(capsys, "runs").splitlines()[1].split()[0]
    assert name == folder.run_id
    by_name = call(capsys, command, name)
    assert by_name == call(capsys, command, folder.root)
    assert by_name == call(capsys, command, name, "--runs", folder.root.parent)
    assert by_name


@pytest.fixture
def old(folder, tmp_path):
    """The run with pages of an earlier version."""
    shutil.copytree(folder.root, tmp_path / "runs" / folder.run_id)
    made = RunDirectory.open(tmp_path / "runs" / folder.run_id)
    for page in (made.index, made.reports / "verdict.html"):
        page.write_text("a page of an earlier version")
    return made


def test_report_rewrites_pages_of_an_earlier_version(old, folder, capsys):
    call(capsys, "report", old.root)
    assert old.index.read_text() == render_index(old)
    new, first = ((run.reports / "verdict.html").read_text() for run in (old, folder))
    assert new == first


def test_report_keeps_pages_of_a_running_run_and_of_forged_evidence(old, capsys):
    with old.alone():
        app(args=["report", str(old.root)], standalone_mode=False)
    assert "not rewritten: run monday is running already" in capsys.readouterr().err
    utility = old.output("utility_report")
    utility.write_text(utility.read_text().replace("monday", "friday"))
    app(args=["report", str(old.root)], standalone_mode=False)
    said = capsys.readouterr()
    assert "not rewritten: " in said.err
    assert f"report: {old.index}" in said.out
    assert old.index.read_text() == "a page of an earlier version"


def test_report_without_the_optional_packages_keeps_the_pages(old):
    """As in an installation without extras, which reads reports of others."""
    code = (
        "import sys\n"
        "for name in ('kfp', 'tensorflow', 'keras', 'apache_beam'): sys.modules[name] = None\n"
        "from fedemb.pipelines.cli.main import main\n"
        f"main(['report', {str(old.root)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"report: {old.index}" in done.stdout
    assert "not rewritten: " in done.stderr
    assert "Traceback" not in done.stderr


def test_report_creates_no_page_of_expired_data(old, capsys):
    old.index.unlink()
    call(capsys, "report", old.root)
    assert not old.index.exists()


@pytest.mark.parametrize("command", ["report", "lineage", "approve"])
def test_unknown_name_is_answered_with_the_command_that_lists_names(
    command, folder, capsys, monkeypatch
):
    monkeypatch.chdir(folder.root.parents[1])
    key = ("--key", "ada") if command == "approve" else ()
    with pytest.raises(InputError, match=r"No run tuesday.*`fedemb runs runs` lists"):
        call(capsys, command, "tuesday", *key)


def test_card_states_the_whole_embedding_space_id(released):
    card = (released.root / "releases" / "glyphs" / "1.0" / "README.md").read_text()
    space = json.loads(released.utility.read_text())["embedding_space_id"]
    assert f"the space of this one is `{space}`." in card


def test_index_links_every_file_that_it_names(folder):
    page = folder.index.read_text()
    links = [unquote(href) for href in re.findall(r'<a href="([^"#]+)"', page)]
    assert {"config.yaml", "run.log", "releases/glyphs/1.0"} <= set(links)
    assert len([href for href in links if href.startswith("public/")]) >= 8
    for href in links:
        assert (folder.root / href).exists(), href


def test_link_goes_where_a_browser_can_go():
    assert link("a b", "releases/a b") == '<a href="releases/a%20b">a b</a>'
    console = "https://console.cloud.google.com/storage/browser"
    assert link("gs://t/r", "gs://t/r") == f'<a href="{console}/t/r">gs://t/r</a>'
    assert link("s3://t/<r>", "s3://t/<r>") == "s3://t/&lt;r&gt;"
    assert Path(unquote(link("x", "/a/<b>").split('"')[1])) == Path("/a/<b>")
