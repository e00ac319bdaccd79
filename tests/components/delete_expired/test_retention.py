"""Retention: what expires, and what is never deleted."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedemb.config.policy import PRIVATE_FOLDERS
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.errors import ConfigError, LedgerError
from fedemb.keys.signatures import Signer
from fedemb.runtime.step import declared
from fedemb.runtime.step_context import StepContext
from fedemb.steps.delete_expired import sweep
from fedemb.steps.delete_expired.retention import Retention, check_apart, known_runs
from tests.kit import ledger_kit

ALL = {"private_days": 30, "working_days": 7, "open_days": 90, "public_days": 60}
FOREVER = dict.fromkeys(Retention.model_fields, None)


class World:
    """A ledger with a run in each state, and data of each in both roots."""

    def __init__(self, root: Path):
        self.root, self.kit = root, ledger_kit.make(root, epsilon_cap=40.0)
        ledger_kit.with_policy_key(self.kit.keys)
        ledger = self.kit.open()
        made = {name: self._run(ledger, name) for name in ("released", "measured", "committed")}
        ledger.reserve(run_id="reserved", content=ledger_kit.content())
        void = ledger.reserve(run_id="void", content=ledger_kit.content())
        ledger.void(void, "wrong data")
        evaluator = Signer.load_or_create(self.kit.keys, "evaluate")
        for name in ("released", "measured"):
            ledger.record_evaluation(name, "0" * 64, evaluator)
        shas = dict.fromkeys(("model_sha", "report_sha", "bundle_sha"), "0" * 64)
        ledger.release(made["released"], **shas, name="glyphs", version="1")
        self.runs = ("released", "measured", "committed", "reserved", "void", "unknown")
        for name in self.runs:
            for folder in PRIVATE_FOLDERS:
                self.write(f"private/{name}/{folder}/part-0")
            self.write(f"private/{name}/users.tree")
            self.write(f"public/{name}/train/model")
            self.write(f"public/dp-fedemb/{name}/train/7/model")
        self.write("private/policy/others/weekly/marks")
        self.write("releases/glyphs/1/model")

    def _run(self, ledger, name):
        reservation = ledger.reserve(run_id=name, content=ledger_kit.content())
        ledger_kit.bind(ledger, reservation, root=name)
        ledger_kit.commit(self.kit, ledger, reservation, 20)
        return reservation

    def write(self, name):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text("data")

    def files(self):
        return {p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file()}

    def sweep(self, days, dry_run=False, **retention):
        """Runs the step after so many days; returns the names of the deleted files."""
        before = self.files()
        out = self.root / "deleted.json"
        context = StepContext(
            RunArtifacts(deleted=out),
            private_root=str(self.root / "private"),
            public_root=str(self.root / "public"),
            ledger=self.kit.ledger_uri,
            retention=json.dumps(retention),
            dry_run=dry_run,
        )
        sweep.run(context, datetime.now(UTC) + timedelta(days=days))
        self.listed = json.loads(out.read_text())
        out.unlink()
        return before - self.files()


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def runs_in(names):
    return {part for name in names for part in name.split("/")[1:3] if part in RUNS}


RUNS = ("released", "measured", "committed", "reserved", "void", "unknown")


def test_states_of_runs_follow_from_the_ledger(world):
    states = {run.run_id: run.state for run in known_runs(world.kit.reader())}
    assert states == {
        "released": "released",
        "measured": "measured",
        "committed": "open",
        "reserved": "open",
        "void": "void",
    }


def test_ledger_keys_releases_and_markers_survive_every_period(world):
    shortest = dict.fromkeys(Retention.model_fields, 1)
    deleted = world.sweep(10_000, **shortest)
    left = world.files()
    assert all(name.startswith(("private/", "public/")) for name in deleted)
    assert {name for name in left if "others" in name} >= {
        "private/policy/others/weekly/marks",
        *(f"private/{name}/others/part-0" for name in RUNS),
    }
    assert {name for name in left if name.startswith("releases/")} == {"releases/glyphs/1/model"}
    assert [name for name in left if name.startswith("ledger/")]
    assert [name for name in left if name.startswith("keys/")]
    assert "unknown" not in runs_in(deleted), "the ledger does not hold it"
    kept = {"committed", "reserved", "unknown"}  # public outputs of open runs
    assert {name.split("/")[1] for name in left if name.startswith("public/")} == {
        *kept,
        "dp-fedemb",
    }


@pytest.mark.parametrize(
    ("days", "periods", "kinds", "runs"),
    [
        (6, ALL, set(), set()),
        (8, ALL, {"working"}, {"released", "measured", "void"}),
        (31, ALL, {"working", "private"}, {"released", "measured", "void"}),
        (61, ALL, {"working", "private", "public"}, {"released", "measured", "void"}),
        (61, {**FOREVER, "public_days": 60}, {"public"}, {"measured", "void"}),
        (61, {**FOREVER, "released_public_days": 60}, {"public"}, {"released"}),
        (91, {**FOREVER, "open_days": 90}, {"working", "private"}, {"committed", "reserved"}),
        (31, {}, {"working", "private"}, {"released", "measured", "void"}),
        (9_999, FOREVER, set(), set()),
    ],
)
def test_data_expires_by_age_kind_and_state(world, days, periods, kinds, runs):
    listed = world.sweep(days, dry_run=True, **periods)
    assert listed == set(), "a dry run deletes nothing"
    found = {(row["kind"], row["run_id"]) for row in world.listed["found"]}
    assert {kind for kind, _ in found} == kinds
    assert {run_id for _, run_id in found} == runs
    deleted = world.sweep(days, **periods)
    assert len(deleted) == world.listed["objects"]
    assert world.listed["bytes"] == 4 * len(deleted)
    assert not world.sweep(days, **periods), "nothing is left"


@pytest.mark.parametrize("dry_run", [True, False])
def test_component_hands_its_parameters_to_the_step(world, dry_run):
    periods = '{"private_days": 1, "working_days": null}'
    figures: dict[str, float] = {}
    later = datetime.now(UTC) + timedelta(days=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep, "datetime", SimpleNamespace(now=lambda _: later))
        declared("delete_expired").component.python_func(
            private_root=str(world.root / "private"),
            public_root="",
            ledger=world.kit.ledger_uri,
            retention=periods,
            dry_run=dry_run,
            deleted=SimpleNamespace(path=str(world.root / "deleted"), uri="", metadata={}),
            metrics=SimpleNamespace(log_metric=figures.__setitem__, path="", uri="", metadata={}),
        )
    body = json.loads((world.root / "deleted").read_text())
    assert body["deleted"] is not dry_run
    assert {row["kind"] for row in body["found"]} == {"private"}
    assert figures == {"objects": body["objects"], "bytes": body["bytes"]}
    assert (world.root / "private/measured/users/part-0").exists() == dry_run
    assert (world.root / "private/measured/train/part-0").exists()


def test_index_of_a_tree_goes_first_and_empty_folders_go_too(world):
    deleted = world.sweep(31)
    assert "private/released/users.tree" in deleted
    assert not (world.root / "private" / "released" / "users").exists()
    rows = [row for row in world.listed["found"] if row["folder"] == "released/users"]
    assert [row["objects"] for row in rows] == [2]


def test_broken_ledger_deletes_nothing(world):
    world.kit.path(3).write_bytes(b"{}")
    before = world.files()
    with pytest.raises(LedgerError):
        world.sweep(10_000, **dict.fromkeys(Retention.model_fields, 1))
    assert world.files() == before


@pytest.mark.parametrize(
    ("roots", "kept"),
    [
        (["gs://b/private", "gs://b"], ["gs://ledger"]),
        (["gs://b/private"], ["gs://b/private/ledger"]),
        (["gs://b/x/private"], ["gs://b/x"]),
        (["/data/private/"], ["file:///data/private/keys"]),
    ],
)
def test_roots_that_overlap_with_kept_stores_are_refused(roots, kept):
    with pytest.raises(ConfigError, match="overlap"):
        check_apart(roots, kept)
    check_apart(["gs://b/private", "gs://b/public"], ["gs://b/private-ledger", "gs://b/keys"])


@pytest.mark.parametrize("text", ["[]", '{"private_days": 0}', '{"days": 3}', "{"])
def test_wrong_periods_are_refused(world, text):
    context = StepContext(
        RunArtifacts(deleted=world.root / "x"),
        private_root=str(world.root / "private"),
        public_root="",
        ledger=world.kit.ledger_uri,
        retention=text,
        dry_run=False,
    )
    with pytest.raises(ConfigError, match="retention is not valid"):
        sweep.run(context)
