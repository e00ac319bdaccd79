"""Commands take the names that `fedemb runs` lists, and pages link the files they name."""

import pytest

from fedemb.errors import InputError
from fedemb.pipelines.run.directory import RunState
from fedemb.pipelines.run.local import closing_lines
from fedemb.release.decide import RULES
from tests.kit.cli import fedemb
from tests.kit.run_folder import run_folder


@pytest.fixture(scope="module")
def folder(released_run, tmp_path_factory):
    return run_folder(released_run, tmp_path_factory.mktemp("folder") / "runs")


def test_runs_command_accepts_the_listed_run_name(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.root.parents[1])
    name = fedemb("runs").splitlines()[1].split()[0]
    assert name == folder.run_id
    by_name = fedemb("runs", name)
    assert by_name == fedemb("runs", folder.root)
    assert by_name == fedemb("runs", name, "--runs", folder.root.parent)
    assert by_name


def test_refusal_names_the_commands_of_a_waiver_with_their_paths(folder, monkeypatch):
    monkeypatch.chdir(folder.root.parents[1])
    rule = next(rule for rule in RULES if rule.waivable)
    lines = closing_lines(folder, RunState(exit_code=3, message=rule.advice))
    keys = folder.stores()["keys"]
    command = f"`fedemb approve runs/{folder.run_id} --waive {rule.code} --keys {keys} "
    assert command in lines[-1]


@pytest.mark.parametrize("command", ["runs", "approve"])
def test_unknown_run_name_error_states_the_command_that_lists_runs(
    command, folder, capsys, monkeypatch
):
    monkeypatch.chdir(folder.root.parents[1])
    key = ("--key", "ada") if command == "approve" else ()
    with pytest.raises(InputError, match=r"No run at tuesday.*`fedemb runs --runs runs` lists"):
        fedemb(command, "tuesday", *key)
