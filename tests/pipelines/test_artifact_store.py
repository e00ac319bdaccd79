"""Where a run's things lie, what is published of it, and what never is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedemb.documents.artifacts import Raw
from fedemb.errors import ConfigError, InputError, LedgerError, Refused, StorageError
from fedemb.foundation.digests import file_digest, tree_digest
from fedemb.pipelines.dp_fedemb import DP_FEDEMB
from fedemb.pipelines.graph import Pipeline, build_pipeline
from fedemb.pipelines.run.artifact_store import Publisher, check_stores, store_overrides
from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.run.load_config import load_config
from fedemb.storage import local_tree, open_store
from fedemb.storage.local import LocalStore

RUNS = Path("/runs")


def _config(*overrides: str):
    return load_config("quickstart", list(overrides))


def test_one_option_places_everything_but_the_keys():
    places = dict(item.split("=") for item in store_overrides("gs://team/x/", "gsm://project"))
    assert places == {
        "storage.public_root": "gs://team/x/public",
        "storage.private_root": "gs://team/x/private",
        "storage.deletion_marks": "gs://team/x/private/policy/deletion_marks",
        "storage.ledger": "gs://team/x/ledger",
        "storage.releases": "gs://team/x/releases",
        "storage.keys": "gsm://project",
    }
    assert store_overrides(None, None) == []


def test_keys_are_asked_for_where_the_ledger_lasts():
    with pytest.raises(ConfigError, match="its keys must last too"):
        check_stores(_config(*store_overrides("/store", None)), "quickstart", RUNS)
    check_stores(_config(*store_overrides("/store", "/keys")), "quickstart", RUNS)
    check_stores(_config(), "quickstart", RUNS)


@pytest.mark.parametrize(
    "moved",
    [
        "keys=/store/ledger",
        "keys=/store/ledger/keys",
        "keys=/store/public/keys",
        "keys=/store",
        "keys=/store/releases/../ledger",
        "private_root=/store/public",
        "private_root=/store/public/raw",
        "private_root=/store",
        "private_root=file:///store/releases/raw",
        "public_root=/store/private/run",
    ],
)
def test_keys_and_private_things_never_lie_beside_what_others_read(moved):
    config = _config(*store_overrides("/store", "/keys"), f"storage.{moved}")
    with pytest.raises(ConfigError, match="must be apart"):
        check_stores(config, "quickstart", RUNS)


@pytest.mark.parametrize("public", ["/runs", "/runs/first/private", "/"])
def test_public_root_never_holds_the_folder_of_runs_nor_the_reverse(public):
    with pytest.raises(ConfigError, match="must be apart"):
        check_stores(_config(f"storage.public_root={public}"), "quickstart", RUNS)


def test_bucket_without_a_ledger_names_the_command_that_makes_one(monkeypatch):
    seen = []

    def nothing(self, name):
        seen.append((self.uri, name))
        return False

    monkeypatch.setattr("fedemb.storage.s3.S3Store.exists", nothing)
    config = _config(*store_overrides("s3://team/x", "/keys"))
    with pytest.raises(LedgerError, match=r"ledger init --config mine\.yaml --ledger s3://te"):
        check_stores(config, "mine.yaml", RUNS)
    assert seen == [("s3://team/x/ledger", "trust.json")]


def test_every_output_of_the_pipeline_is_known_and_no_other():
    spec = build_pipeline(DP_FEDEMB, "run").pipeline_spec
    for name, component in spec.components.items():
        declared = {
            output
            for output, about in component.output_definitions.artifacts.items()
            if not about.artifact_type.schema_title.endswith("Metrics")  # numbers, not files
        }
        known = set(OUTPUTS[name.removeprefix("comp-").replace("-", "_")])
        assert declared == known, name


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """A run whose steps have written something, as kfp lays it out."""
    config = _config("data.source.uri=/photos.parquet")
    made = RunDirectory.create(tmp_path / "runs", "one", config)
    for step, outputs in OUTPUTS.items():
        folder = made.public / "dp-fedemb-1" / step.replace("_", "-")
        for name in outputs:
            if name in ("model", "pretrained"):
                (folder / name).mkdir(parents=True)
                (folder / name / "backbone.keras").write_bytes(name.encode() * 1000)
                (folder / name / "model.json").write_text("{}")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(f'{{"{name}": 1}}')
        (folder / "executor_output.json").write_text("{}")
    return made


OUTPUTS = DP_FEDEMB.published()
STATE = RunState(exit_code=0)
TOTAL = sum(len(outputs) for outputs in OUTPUTS.values())


def _publish(run: RunDirectory, uri: str) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    Publisher(run, uri).finish(STATE, lambda done, total: seen.append((done, total)))
    return seen


def _manifest(uri: str) -> dict:
    return json.loads(open_store(uri).read("one/run.json"))


def test_published_outputs_are_those_of_the_run(run, tmp_path):
    uri = str(tmp_path / "public")
    seen = _publish(run, uri)
    assert seen == [(number, TOTAL) for number in range(1, TOTAL + 1)]
    rows = {(row["step"], row["name"]): row for row in _manifest(uri)["artifacts"]}
    assert set(rows) == {(step, name) for step in OUTPUTS for name in OUTPUTS[step]}
    assert rows["train_dp_fedemb", "model"]["kind"] == "Noised"
    with local_tree(f"{uri}/one") as folder:
        for (step, name), row in rows.items():
            path = folder / step / name
            digest = tree_digest(path) if path.is_dir() else file_digest(path)
            assert digest == row["sha256"]


def test_model_of_a_simulation_is_not_published(run, tmp_path, monkeypatch):
    simulation = run.config().updated({"purpose": "simulation"})
    monkeypatch.setattr(RunDirectory, "config", lambda _: simulation)
    uri = str(tmp_path / "public")
    publisher = Publisher(run, uri)
    publisher.step_finished("train_dp_fedemb")
    publisher.finish(STATE, lambda done, total: None)
    published = {(row["step"], row["name"]) for row in _manifest(uri)["artifacts"]}
    assert published == {(step, name) for step in OUTPUTS for name in OUTPUTS[step]} - {
        ("train_dp_fedemb", "model")
    }
    assert not [name for name in open_store(uri).list() if "train_dp_fedemb" in name]


def test_nothing_raw_and_nothing_unknown_is_published(run, tmp_path):
    (run.private / "one").mkdir()
    (run.private / "one" / "users-00000.arrayrecord").write_bytes(b"images")
    step = run.public / "dp-fedemb-1" / "audit-privacy"
    (step / "scores").write_bytes(b"a figure for every user")  # a step that is at fault
    (run.root / "run.log").write_text("what the steps printed")
    uri = str(tmp_path / "public")
    _publish(run, uri)
    names = open_store(uri).list()
    assert "one/audit_privacy/audit_report" in names
    for word in ("scores", "users-0", "run.log", "executor_output", "keys", "config.yaml"):
        assert not [name for name in names if word in name]


def test_output_declared_raw_is_refused(run, tmp_path, monkeypatch):
    raw = {**OUTPUTS, "audit_privacy": {"audit_report": Raw}}
    monkeypatch.setattr(Pipeline, "published", lambda _: raw)
    with pytest.raises(Refused, match="Raw"):
        _publish(run, str(tmp_path / "public"))
    assert not (tmp_path / "public" / "one" / "run.json").exists()


def test_publishing_again_sends_nothing_again(run, tmp_path, monkeypatch):
    uri = str(tmp_path / "public")
    _publish(run, uri)
    before = open_store(uri).read("one/run.json")
    written = []
    write, upload = LocalStore.write, LocalStore._upload
    monkeypatch.setattr(LocalStore, "write", lambda *args: (written.append(args[1]), write(*args)))
    monkeypatch.setattr(
        LocalStore, "_upload", lambda *args: (written.append(args[2]), upload(*args))
    )
    _publish(run, uri)
    assert written == ["run.json"]
    assert open_store(uri).read("one/run.json") == before


def test_publishing_cut_short_has_no_manifest_and_goes_on(run, tmp_path, monkeypatch):
    uri = str(tmp_path / "public")
    write = LocalStore.write

    def full(self, name, data):
        if name.startswith("gate_release"):
            raise StorageError("the disk is full")
        write(self, name, data)

    monkeypatch.setattr(LocalStore, "write", full)
    with pytest.raises(StorageError):
        _publish(run, uri)
    assert "one/account_privacy/privacy_report" in open_store(uri).list()
    assert not open_store(uri).exists("one/run.json")
    monkeypatch.setattr(LocalStore, "write", write)
    assert len(_publish(run, uri)) == TOTAL
    assert len(_manifest(uri)["artifacts"]) == TOTAL


def test_steps_are_published_while_the_run_goes_on_and_a_failure_waits_for_the_end(run, tmp_path):
    uri = str(tmp_path / "public")
    publisher = Publisher(run, uri)
    publisher.step_finished("plan_privacy")
    publisher.step_finished("no_step_of_ours")
    for sent in publisher._sent:
        sent.result(60)
    assert open_store(uri).list() == ["one/plan_privacy/privacy_plan"]
    blocked = tmp_path / "blocked"
    blocked.write_text("a file instead of the folder")
    publisher = Publisher(run, str(blocked))
    publisher.step_finished("plan_privacy")
    with pytest.raises(InputError, match="Not a directory"):
        publisher.finish(STATE, lambda *_: None)


def test_finished_run_is_published_and_not_run_again(run, tmp_path, monkeypatch, capsys):
    from fedemb.pipelines.run import command as run_command

    uri = tmp_path / "public"
    run.write_state(replace(STATE, closing_lines=["guarantee: g", "utility: u", "release: r"]))
    config = run.config().updated({"storage.public_root": str(uri)})
    monkeypatch.setattr(RunDirectory, "config", lambda self: config)
    monkeypatch.setattr(run_command, "run_pipeline", lambda *_: pytest.fail("it ran again"))
    assert run_command.execute(run) == 0
    shown = capsys.readouterr().out
    assert "no step is run again" in shown
    assert f"artifacts: {TOTAL} at {uri}/one" in shown
    (uri / "one" / "run.json").unlink()
    Path(uri / "one" / "gate_release" / "verdict").unlink()
    monkeypatch.setattr(LocalStore, "write", _cut)
    assert run_command.execute(run) == 4
    said = capsys.readouterr().out
    assert "not all published: the connection is cut" in said
    assert f"resume with: {run.resumed_by}" in said


def _cut(self, name, data):
    raise StorageError("the connection is cut")
