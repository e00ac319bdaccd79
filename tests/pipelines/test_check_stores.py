"""Which stores a run may have, and which outputs its steps declare."""

from pathlib import Path

import pytest

from fedemb.errors import ConfigError, LedgerError, StorageError
from fedemb.pipelines.graph import build_pipeline
from fedemb.pipelines.run.command import check_stores
from fedemb.pipelines.run.load_config import load_config
from fedemb.pipelines.steps import PIPELINE
from fedemb.runtime.step import declared

RUNS = Path("/runs")


def _config(*overrides: str):
    return load_config("quickstart", list(overrides))


def _at(root: str, **moved: str):
    """A configuration with all stores except the keys in one root."""
    names = {"public_root": "public", "private_root": "private"}
    names |= {name: name for name in ("ledger", "releases")}
    places = {name: f"{root}/{part}" for name, part in names.items()} | moved
    return _config(*(f"storage.{name}={place}" for name, place in places.items()))


def test_persistent_ledger_requires_keys():
    with pytest.raises(ConfigError, match="its keys must last too"):
        check_stores(_at("/store"), "quickstart", RUNS)
    check_stores(_at("/store", keys="/keys"), "quickstart", RUNS)
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
def test_keys_and_private_files_are_not_in_public_folders(moved):
    name, place = moved.split("=")
    config = _at("/store", **{"keys": "/keys", name: place})
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

    monkeypatch.setattr("fedemb.storage.buckets.S3Store.exists", nothing)
    config = _at("s3://team/x", keys="/keys")
    with pytest.raises(LedgerError, match=r"ledger init --config mine\.yaml --ledger s3://te"):
        check_stores(config, "mine.yaml", RUNS)
    assert seen == [("s3://team/x/ledger", "trust.json")]


@pytest.mark.parametrize("store", ["keys", "private_root", "public_root", "releases"])
def test_store_that_cannot_be_reached_is_refused_before_data_are_drawn(store):
    with pytest.raises(StorageError, match="aaa"):
        check_stores(_config(f"storage.{store}={'a' * 300}/x"), "quickstart", RUNS)


def test_declared_step_files_equal_the_pipeline_outputs():
    spec = build_pipeline(PIPELINE, "run").pipeline_spec
    for name, component in spec.components.items():
        compiled = {
            output
            for output, about in component.output_definitions.artifacts.items()
            if not about.artifact_type.schema_title.endswith("Metrics")  # numbers, not files
        }
        known = set(declared(name.removeprefix("comp-").replace("-", "_")).files)
        assert compiled == known, name
