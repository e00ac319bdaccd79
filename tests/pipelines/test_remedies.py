"""Every error that names an option: with what it names, the same command gets further.

`WRONG` runs a command that is refused, then the command that the message asks for. Each error that
names an option is provoked here, or is listed in `ELSEWHERE` with the test that applies its remedy.
"""

from __future__ import annotations

import ast
import io
import re
import shlex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from fedemb.errors import FedEmbError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.load_config import load_config

BOUND = "--users-lower-bound 1000 --public none"
CHARGE = "ledger charge one --ledger {d}/policy/ledger --keys {d}/policy/keys --reason r"
STORES = "--ledger {d}/policy/ledger --keys {d}/policy/keys"

WRONG = {
    # message -> refused command, command with the remedy
    "--image-root is": (
        "init --data {d}/photos.parquet --image-root {d} " + BOUND,
        "init --data {d}/photos.parquet -o {d}/1.yaml " + BOUND,
    ),
    "no column of": (
        "init --data {d}/odd.parquet " + BOUND,
        "init --data {d}/odd.parquet --column user_id=x --column image=y -o {d}/2.yaml " + BOUND,
    ),
    "The format of": (
        "init --data {d}/photos.bin " + BOUND,
        "init --data {d}/photos.bin --format parquet -o {d}/3.yaml " + BOUND,
    ),
    "declare the loss once": (CHARGE, CHARGE + " --epsilon 0.1"),
    "has no policy": (
        "ledger show --ledger {d}/policy/ledger --policy other",
        "ledger show --ledger {d}/policy/ledger --policy mine",
    ),
    "holds several policies": (
        "ledger show --ledger {d}/two/ledger",
        "ledger show --ledger {d}/two/ledger --policy mine",
    ),
    "has no run": (
        "ledger void never --reason r " + STORES,
        "ledger show --ledger {d}/policy/ledger",
    ),
    "--anchor .* is not valid": (
        "ledger verify --ledger {d}/policy/ledger --anchor nine",
        "ledger verify --ledger {d}/policy/ledger --anchor 0:{sha}",
    ),
    "--role .* is unknown": (
        "ledger rotate-keys --role none --reason r " + STORES,
        "ledger rotate-keys --role report --reason r " + STORES,
    ),
    "--public-photos is for": (
        "init --data {d}/photos.parquet --public-photos {d}/photos.parquet " + BOUND,
        "init --data {d}/photos.parquet -o {d}/4.yaml " + BOUND,
    ),
    "--pixels is for": (
        "init --data {d}/photos.parquet --pixels 0..1 " + BOUND,
        "init --data {d}/photos.parquet -o {d}/5.yaml " + BOUND,
    ),
    "exists. Remove it, or pass another file": (
        "init --data {d}/photos.parquet -o {d}/mine.yaml " + BOUND,
        "init --data {d}/photos.parquet -o {d}/6.yaml " + BOUND,
    ),
    "--alike is class, and users share no class": (
        "init --data {d}/unlabelled.parquet --alike class " + BOUND,
        "init --data {d}/unlabelled.parquet -o {d}/7.yaml " + BOUND,
    ),
    "--alike is .*Pass user or class": (
        "init --data {d}/photos.parquet --alike both " + BOUND,
        "init --data {d}/photos.parquet --alike user -o {d}/8.yaml " + BOUND,
    ),
    "--task is .*Pass embedding": (
        "init --data {d}/photos.parquet --task both " + BOUND,
        "init --data {d}/photos.parquet --task embedding -o {d}/9.yaml " + BOUND,
    ),
    "is for embeddings, and --task is": (
        "init --data {d}/photos.parquet --task classification --alike user " + BOUND,
        "init --data {d}/photos.parquet --alike user -o {d}/10.yaml " + BOUND,
    ),
    "--format is": (
        "init --data {d}/photos.parquet --format zip " + BOUND,
        "init --data {d}/photos.parquet --format parquet -o {d}/11.yaml " + BOUND,
    ),
    "--column is user_id=none": (
        "init --data {d}/photos.parquet --column user_id=none " + BOUND,
        "init --data {d}/photos.parquet --column user_id=user_id -o {d}/12.yaml " + BOUND,
    ),
    "no column has the class": (
        "init --data {d}/unlabelled.parquet --task classification " + BOUND,
        "init --data {d}/unlabelled.parquet --task classification --column label=other "
        "--classes a,b -o {d}/13.yaml " + BOUND,
    ),
    "--column is .*Pass COLUMN=NAME": (
        "init --data {d}/photos.parquet --column nothing " + BOUND,
        "init --data {d}/photos.parquet --column user_id=user_id -o {d}/14.yaml " + BOUND,
    ),
    "No photo in": (
        "init --data {d}/broken.parquet --column image=image " + BOUND,
        "init --data {d}/broken.parquet --column image=good -o {d}/15.yaml " + BOUND,
    ),
    "--from resumes a run": ("run --from train_dp_fedemb", "run --resume {d}/nowhere"),
    "No public keys for": (
        "embed {d} -m {d}/policy",
        "embed {d} -m {d}/policy --trust {d}/policy/ledger/trust.json",
    ),
    "are private, and their budget": (
        "run --config {d}/mine.yaml --data {d}/photos.parquet --runs {d}/runs",
        "run --config {d}/mine.yaml --data {d}/photos.parquet --runs {d}/runs --policy {d}/policy "
        "--dry-run",
    ),
    "--run-id .* is not valid": (
        "run --config quickstart --run-id a/b --runs {d}/runs",
        "run --config quickstart --run-id a-b --runs {d}/runs --dry-run",
    ),
    "--set .* is not valid": (
        "config -c quickstart --set rounds",
        "config -c quickstart --set mechanism.rounds=20",
    ),
    "no setting lies so deep": (
        "config -c quickstart --set " + ".".join("abcdefghijklmnopqrstuvwxyz") + "=1",
        "config -c quickstart",
    ),
    "quote it": (
        "config -c quickstart --set 'policy.policy_id=[a'",
        "config -c quickstart --set 'policy.policy_id=\"[a\"'",
    ),
}
"""Pattern of the message -> the refused command, and the command with the remedy."""

ELSEWHERE = {
    r"No ledger in": "pipelines/test_check_stores.py",
    r"a loss for X does not cover": "components/ledger",
    r"rollback anchor for life": "components/ledger",
    r"does not fit .* which takes": "components/public_backbone",
    r"--size is|Pass a larger --size": "components/public_backbone",
    r"--pixels is .*Pass one of|has no card: it was not written by": "components/public_backbone",
    r"differs from what was planned": "pipelines/test_pipelines_cli_plan.py",
    r"A waiver is signed by|--key to approve": "components/gate",
    r"pass --skip-saved-model": "pipelines/test_cli_verify.py",
    r"--reason is empty": "pipelines/test_cli_ledger.py",
    r"`fedemb runs --runs X` lists": "pipelines/test_named_runs.py",
    r"Run X exists\. Resume|--from X|Unknown step --from|a release does not change"
    r"|run the step again with --from": "pipelines/test_resume.py",
    r"below --min-remaining": "pipelines/test_cli_ledger.py",
    r"No Kubeflow API host|No image for|profile pins packages|is listed without a state"
    r"|Package X is the pipeline|earlier submission|earlier run|cannot be resumed from"
    r"|Resume the run without --from|and approve that run": "cluster",
}
"""Pattern of the message -> where its remedy is applied, below tests/: needs a server, a network or
a finished run."""


def _texts(node: ast.AST):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.FormattedValue):
        yield "X"
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def run(command: str) -> str:
    """Returns the error of a command; empty if it has none."""
    try:
        app(args=shlex.split(command), standalone_mode=False)
    except FedEmbError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photos, a configuration and ledgers."""
    top = tmp_path_factory.mktemp("remedies")
    random = np.random.default_rng(0)

    def photo():
        sink = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (28, 28), np.uint8)).save(sink, "PNG")
        return sink.getvalue()

    photos = [photo() for _ in range(60)]
    users = [f"user {n // 3}" for n in range(60)]
    classes = ["a" if n % 2 else "b" for n in range(60)]
    tables = {
        "photos": {"user_id": users, "image": photos, "label": classes, "other": classes},
        "unlabelled": {"user_id": users, "image": photos, "other": classes},
        "odd": {"x": users, "y": photos},
        "broken": {"user_id": users, "image": [b"x"] * 60, "good": photos},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), top / f"{name}.parquet")
    (top / "photos.bin").write_bytes((top / "photos.parquet").read_bytes())
    config = load_config("quickstart").model_dump(mode="json", exclude_defaults=True)
    config["policy"] |= {"policy_id": "mine", "composition": "renyi", "epsilon_cap": 20}
    (top / "mine.yaml").write_text(yaml.safe_dump(config))
    config["policy"]["policy_id"] = "second"
    (top / "second.yaml").write_text(yaml.safe_dump(config))
    for name, files in (("policy", ["mine"]), ("empty", ["mine"]), ("two", ["mine", "second"])):
        for file in files:
            stores = f"--ledger {top}/{name}/ledger --keys {top}/{name}/keys"
            assert run(f"ledger init --config {top}/{file}.yaml {stores}") == ""
    return top


@pytest.mark.long
@pytest.mark.parametrize("message", WRONG)
def test_remedy_of_an_error_is_accepted(folder, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEMB_TRUST", raising=False)
    sha = "0" * 64
    wrong, right = (text.format(d=folder, sha=sha) for text in WRONG[message])
    refused = run(wrong)
    assert re.search(message, refused), refused
    again = run(right)
    assert not re.search(message, again), again
