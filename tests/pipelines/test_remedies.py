"""Errors that name an option: with what they name, the same command gets further."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedemb.data.pixels import encode_png
from fedemb.errors import FedEmbError
from fedemb.pipelines.cli.main import app
from fedemb.pipelines.run.load_config import load_config
from tests.docs.messages import messages

BOUND = "--users-lower-bound 1000 --public none"

INIT = {
    # message -> refused data and options of `fedemb init`, and those with the remedy
    "--image-root is": ("photos.parquet --image-root {d}", "photos.parquet"),
    "no column of": ("odd.parquet", "odd.parquet --column user_id=x --column image=y"),
    "The format of": ("photos.bin", "photos.bin --format parquet"),
    "public-photos is for": ("photos.parquet --public-photos {d}/photos.parquet", "photos.parquet"),
    "--pixels is for": ("photos.parquet --pixels 0..1", "photos.parquet"),
    "users share no class": ("unlabelled.parquet --alike class", "unlabelled.parquet"),
    "Pass user or class": ("photos.parquet --alike both", "photos.parquet --alike user"),
    "--task is .*Pass embedding": ("photos.parquet --task both", "photos.parquet --task embedding"),
    "is for embeddings, and --task is": (
        "photos.parquet --task classification --alike user",
        "photos.parquet --alike user",
    ),
    "--format is": ("photos.parquet --format zip", "photos.parquet --format parquet"),
    "--column is user_id=none": (
        "photos.parquet --column user_id=none",
        "photos.parquet --column user_id=user_id",
    ),
    "no column has the class.*Pass one of (user_id, image, other|X) by": (
        "unlabelled.parquet --task classification",
        "unlabelled.parquet --task classification --column label=other --classes a,b",
    ),
    "COLUMN=NAME": ("photos.parquet --column nothing", "photos.parquet --column user_id=user_id"),
    "exists. Remove it": ("photos.parquet -o {d}/mine.yaml", "photos.parquet"),
    "A classifier has a public list": (
        "photos.parquet --task classification",
        "photos.parquet --task classification --classes a,b",
    ),
    "No photo in": ("broken.parquet --column image=image", "broken.parquet --column image=good"),
}

WRONG = {
    # message -> refused command, command with the remedy
    "declare the loss once": (
        "ledger charge one {stores} --reason r",
        "ledger charge one {stores} --reason r --epsilon 0.1",
    ),
    "has no policy": (
        "ledger show --policy {d}/policy --policy-id other",
        "ledger show --policy {d}/policy --policy-id mine",
    ),
    "holds several policies": (
        "ledger show --policy {d}/two",
        "ledger show --policy {d}/two --policy-id mine",
    ),
    "has no run": ("ledger void never --reason r {stores}", "ledger show --policy {d}/policy"),
    "--anchor .* is not valid": (
        "ledger verify --policy {d}/policy --anchor nine",
        "ledger verify --policy {d}/policy --anchor 0:{sha}",
    ),
    "--role .* is unknown": (
        "ledger rotate-keys --role none --reason r {stores}",
        "ledger rotate-keys --role report --reason r {stores}",
    ),
    "--reason is empty": (
        "ledger charge new {stores} --epsilon 0.1 --reason ''",
        "ledger charge new {stores} --epsilon 0.1 --reason moved",
    ),
    "below --min-remaining": (
        "ledger show {stores} --min-remaining 30",
        "ledger show {stores} --min-remaining 3",
    ),
    "Pass the loss for .* with --relation": (
        "ledger charge one {stores} --reason r --epsilon 0.1 --relation REPLACE_ONE",
        "ledger charge one {stores} --reason r --epsilon 0.1 --relation ADD_OR_REMOVE_ONE",
    ),
    "name two ledgers": (
        "run --set storage.ledger=/a --policy {d}/policy --runs {d}/runs --dry-run",
        "run --policy {d}/empty --runs {d}/runs --dry-run",
    ),
    "Pass --key to approve": ("approve {d}/run", "approve {d}/run --key {d}/key"),
    "No Kubeflow API host": (
        "submit {d}/pipeline.yaml -c {d}/mine.yaml",
        "submit {d}/pipeline.yaml -c {d}/mine.yaml --host http://127.0.0.1:9",
    ),
    "No image for": (
        "compile -o {d}/pipeline.yaml",
        "compile -o {d}/pipeline.yaml --image light=a@sha256:{sha} --image cpu=a@sha256:{sha}"
        " --image trainer=a@sha256:{sha}",
    ),
    "--size is": (
        "backbone get efficientnet_lite0 --size 8 -o {d}/x.keras",
        "backbone get efficientnet_lite0 --size 64 -o {d}/x.keras",
    ),
    "--from resumes a run": ("run --from train_model", "run --resume {d}/nowhere"),
    "(trust|X) with --": ("embed {d} -m {d}/policy", "embed {d} -m {d}/policy --policy {d}/policy"),
    "are private, and their budget": (
        "run -c {d}/mine.yaml --data {d}/photos.parquet --runs {d}",
        "run -c {d}/mine.yaml --data {d}/photos.parquet --runs {d} --policy {d}/policy --dry-run",
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
        "config -c quickstart --set a.b.c.d.e.f.g.h.i.j.k.l.m.n.o.p.q.r.s.t.u.v.w.x.y.z=1",
        "config -c quickstart",
    ),
    "quote it": (
        "config -c quickstart --set 'policy.policy_id=[a'",
        "config -c quickstart --set 'policy.policy_id=\"[a\"'",
    ),
    **{
        message: (
            f"init --data {{d}}/{wrong} {BOUND}",
            f"init --data {{d}}/{right} -o {{d}}/{number}.yaml {BOUND}",
        )
        for number, (message, (wrong, right)) in enumerate(INIT.items())
    },
}
"""Pattern of the message -> the refused command, and the command with the remedy."""
ELSEWHERE = {
    "test_submit.py": "pass --again|Pass --again|resumed from|without --from|resumes an earlier",
    "test_approve_on_cluster.py": "with --package|has no argument",
    "test_named_runs.py": "No run at",
    "test_load_and_prepare.py": "Run X exists",
    "test_resume.py": "--from X|Unknown step|is gone from|--set release.version",
    "test_cli_init.py": "--pixels",
    "test_cli_trusted.py": "--skip-saved-model",
    "../components/gate/test_gate_approvals.py": "A waiver is signed by|rollback anchor",
    "../components/ledger/test_ledger_keys.py": "fedemb ledger init",
    "../components/privacy/test_privacy_queries.py": "pip install --no-deps",
    "../components/release/test_release_registries.py": "fedemb register",
    "../components/public_backbone/test_applications.py": "backbone get --size",
}
"""Test of errors that need a server, a run or a package -> patterns of their messages."""


def test_every_error_that_names_an_option_is_tried():
    wrong = [
        message.text
        for message in messages()
        if message.kind == "error" and re.search(r"(?<![\w-])--[a-z]", message.text)
        if not any(re.search(known, message.text) for known in (*WRONG, *ELSEWHERE.values()))
    ]
    assert not wrong
    assert all((Path(__file__).parent / name).is_file() for name in ELSEWHERE)


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

    photos = [encode_png(random.integers(0, 256, (28, 28, 1), np.uint8)) for _ in range(60)]
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
            stores = f"--policy {top}/{name}"
            assert run(f"ledger init --config {top}/{file}.yaml {stores}") == ""
    return top


@pytest.mark.long
@pytest.mark.parametrize("message", WRONG)
def test_remedy_of_an_error_is_accepted(folder, tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDEMB_POLICY", raising=False)
    stores = f"--policy {folder}/policy"
    wrong, right = (t.format(d=folder, sha="0" * 64, stores=stores) for t in WRONG[message])
    refused = run(wrong)
    assert re.search(message, refused), refused
    again = run(right)
    assert not re.search(message, again), again
