"""Wrong input on the command line: one sentence, the right exit code, no traceback."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedemb.errors import ConfigError, StorageError
from fedemb.pipelines.run.command import prepare
from fedemb.pipelines.run.load_config import load_config, with_data
from tests.kit.cli import ended


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("KFP_HOST", raising=False)


SMALL = ("--set", "data.builtin.public_classes=2", "--set", "data.builtin.users=100")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("config", "-c", "FOLDER"), 2, "Is a directory"),
        (("config", "-c", "quickstrat"), 2, "Did you mean the preset quickstart?"),
        (("config", "-c", "none.yaml"), 2, "Configuration none.yaml does not exist. Pass"),
        (("config", "-c", "FOLDER/broken.yaml"), 2, "not valid YAML (line 1, column 5: "),
        (("backbone", "get", "zzz", "-o", "FOLDER/b.keras"), 2, "'zzz' does not exist"),
        (("run", "--set", "pretraining={kind: import, import_path: /x.keras}"), 2, "not exist"),
        (("config", "-c", "FOLDER/binary.yaml"), 2, "not text"),
        (("make-data", "FOLDER", "--users", "300", "--images-per-user", "0"), 2, "s_per_user: "),
        (("make-data", "FOLDER", "--users", "300", "--image-size", "0"), 2, "--image-size"),
        (("make-data", "s3://photos/drawn", "--users", "100"), 2, "a folder of this machine"),
        (("make-data", "FOLDER/binary.yaml/x", "--users", "100"), 2, "could not write"),
        (("run", "--runs", "FOLDER/binary.yaml", "--data", "FOLDER/x.parquet", "--policy",
          "FOLDER/policy", *SMALL), 2, "name another"),
        (("run", "--policy", "FOLDER/binary.yaml/policy", "--dry-run"), 2, "binary.yaml is a file"),
        (("ledger", "init", "-c", "quickstart", "--ledger", "FOLDER/new", "--keys",
          "FOLDER/binary.yaml/keys"), 2, "the key store"),
        (("ledger", "init", "-c", "quickstart", "--ledger", "FOLDER/binary.yaml/x", "--keys",
          "FOLDER/k"),
         2, "could not create trust.json"),
        (("ledger", "init", "-c", "quickstart", "--ledger", "FOLDER/binary.yaml", "--keys",
          "FOLDER/k"),
         2, "a file is at the path of a folder"),
        (("ledger", "show", "--ledger", "FOLDER/none"), 2, "No ledger"),
        (("verify", "FOLDER/none", "--trust", "x"), 2, "no release folder"),
        (("submit", "FOLDER/broken.yaml", "-c", "quickstart", "--dry-run"), 2, "not a compiled"),
        (("submit", "FOLDER/broken.yaml", "-c", "quickstart"), 2, "Pass --host"),
        (("schedule", "FOLDER"), 2, "Pass --host"),
    ],
)  # fmt: skip
def test_invalid_cli_input_exits_2_without_traceback(capsys, tmp_path, words, code, sentence):
    photos = {"user_id": ["a"], "label": ["b"], "image": [b"c"]}
    pq.write_table(pa.table(photos), tmp_path / "x.parquet")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.yaml").write_text("a: [")
    words = [word.replace("FOLDER", str(tmp_path)).replace("K", str(tmp_path)) for word in words]
    got, _, error = ended(*words)
    assert got == code
    assert sentence in error
    assert "Traceback" not in error


def test_unexpected_error_asks_for_a_report_and_keeps_its_traceback(capsys, monkeypatch):
    def broken():
        raise KeyError("surprise")

    monkeypatch.setattr("fedemb.pipelines.run.load_config.preset_names", broken)
    code, _, error = ended("config", "-c", "nothing")
    assert code == 1
    assert "please report" in error
    assert "KeyError: 'surprise'" in error
    assert "Traceback" in error


def test_run_on_own_data_draws_no_glyphs_and_prints_its_assumptions(tmp_path, capsys):
    made = prepare("quickstart", (), tmp_path, data="/photos.parquet", policy=tmp_path)
    config = made.config()
    assert config.data.source.uri == "/photos.parquet"
    assert not (tmp_path / "builtin-data").exists()
    said = capsys.readouterr().out
    assert "public backbone: none" in said
    assert "at least 28,000 users" in said


def test_private_file_as_public_source_is_refused(tmp_path):
    tree = load_config("omniglot_identities").model_dump(mode="json")
    del tree["pretraining"]["source"]["where"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="taken for public"):
        load_config(path)
    with pytest.raises(ConfigError, match="taken for public"):
        with_data(
            load_config("quickstart", ["pretraining.source.uri=/photos.parquet"]), "/photos.parquet"
        )


def test_key_store_without_google_credentials_is_a_storage_error(monkeypatch):
    from google.auth.exceptions import DefaultCredentialsError

    from fedemb.keys import open_key_store

    def none(*_args, **_named):
        raise DefaultCredentialsError("none")

    monkeypatch.setattr("google.auth.default", none)
    with pytest.raises(StorageError, match="gcloud auth"):
        open_key_store("gsm://project")
