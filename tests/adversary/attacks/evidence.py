"""Attacks on bundles, ledgers, private folders and public backbones."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from functools import cache
from pathlib import Path

import h5py
import numpy as np

from fedemb.data.client_data import FolderCommitment, verified_copy
from fedemb.documents.fields import Tensor
from fedemb.documents.model import stored_tensors, tensor_problem
from fedemb.foundation.canonical_json import file_digest, tree_digest
from fedemb.keys import commit_to_users
from fedemb.ledger import check_high_water, open_ledger, read_trust
from fedemb.pipelines.cli.options import require_released
from fedemb.release.bundle import ALL, MANIFEST, PARITY, SAVED_MODEL
from fedemb.storage import open_store
from tests.adversary.attacks.kind import Attack, Kind, World, attempted, damaged
from tests.kit.pipeline_runs import honest_run
from tests.kit.sealed_bundle import seal_again
from tests.kit.verified import problems_of

# ---- bundles -------------------------------------------------------------------------------------


def _bundle(world: World, draw: random.Random) -> Attack:
    name = draw.choice(sorted(ALL))
    other = draw.choice(sorted(ALL - {name}))
    way = draw.choice(["damaged"] * 4 + ["removed", "link", "other", "extra", "large", "claimed"])
    seed = draw.randrange(2**32)
    extra = draw.choice(["x", ".hidden", "a\rverified", "\x1b[2Jverified", "saved_model/x.so"])
    extra += str(draw.randrange(100))

    def change(bundle: Path) -> str:
        path = bundle / name
        if way == "damaged":
            text, data = damaged(path.read_bytes(), random.Random(seed))
            path.write_bytes(data)
            return text
        if way == "removed":
            path.unlink()
        elif way == "link":
            moved = bundle.parent / "moved"
            path.rename(moved)
            path.symlink_to(moved)
        elif way == "other":
            data = (bundle / other).read_bytes()
            path.write_bytes(data if data != path.read_bytes() else data + b" ")
        elif way == "extra":
            (bundle / extra).write_bytes(b"")
        else:
            with path.open("r+b") as file:
                file.truncate((1 + seed % 50) << 30)
            if way == "claimed" and name != "manifest.json":
                _claim(bundle)
        return ""

    def act() -> str:
        with world.bundle() as (bundle, trust):
            text = change(bundle)
            found = attempted(lambda: require_released(bundle, trust))
            return f"{found} ({text})" if found else ""

    what = {"extra": extra, "other": f"{name} is {other}"}.get(way, f"{name}, {seed % 10_000}")
    return Attack(f"{way}: {what!r}", act)


def _claim(bundle: Path) -> None:
    """The manifest names sizes and digests that fit; only its signature does not."""
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["sizes"]:
        manifest["sizes"][name] = (bundle / name).stat().st_size
        if manifest["sizes"][name] < 1 << 24:
            manifest["files"][name] = file_digest(bundle / name)
    path.write_text(json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False) + "\n")


def _signed(world: World, draw: random.Random) -> Attack:
    """The holder of the release key changes a file; numbers in parity.json may differ a little."""
    # What TensorFlow rebuilds is compared by tests/components/release/test_release_whitelist.py.
    name = draw.choice(sorted(n for n in ALL - {MANIFEST, PARITY} if SAVED_MODEL not in n))
    seed = draw.randrange(2**32)

    def act() -> str:
        with world.bundle() as (bundle, trust):
            text, data = damaged((bundle / name).read_bytes(), random.Random(seed))
            (bundle / name).write_bytes(data)
            seal_again(bundle, world.released.keys, world.released.ledger())
            with honest_run.stand_in_for_serving():
                return "" if problems_of(str(bundle), trust) else f"it is verified ({text})"

    return Attack(f"{name}, {seed % 10_000}", act)


# ---- ledgers -------------------------------------------------------------------------------------


def _ledger(world: World, draw: random.Random) -> Attack:
    way = draw.choice(["damaged"] * 3 + ["removed", "swapped", "copied", "cut", "of another name"])
    place, seed = draw.randrange(100), draw.randrange(2**32)

    def act() -> str:
        with world.run() as run:
            folder = run.policy_root / "ledger" / "weekly"
            records = sorted(folder.glob("0*.json"))
            path = records[place % len(records)]
            text = way
            if way == "damaged":
                text, data = damaged(path.read_bytes(), random.Random(seed))
                path.write_bytes(data)
            elif way == "removed":
                path.unlink()
            elif way == "swapped":
                first, second = path.read_bytes(), records[place % len(records) - 1].read_bytes()
                path.write_bytes(second)
                records[place % len(records) - 1].write_bytes(first)
            elif way == "copied":
                (folder / f"{len(records):08d}.json").write_bytes(path.read_bytes())
            elif way == "of another name":
                path.rename(folder / f"{len(records) + place:08d}.json")
            else:
                for record in records[1 + place % (len(records) - 1) :]:
                    record.unlink()

            def read() -> None:
                store = open_store(run.ledger_uri)
                ledger = open_ledger(run.ledger_uri, "weekly", trust=read_trust(store))
                ledger.unlock(run.keys)
                check_high_water(ledger, run.keys, None)

            found = attempted(read)
            return f"{found} ({text} {path.name})" if found else ""

    return Attack(f"{way}, record {place}, {seed % 10_000}", act)


# ---- private folders -----------------------------------------------------------------------------


@cache
def _people(root: Path) -> FolderCommitment:
    for number in range(5):
        data = random.Random(number).randbytes(200 + 50 * number)
        (root / f"evaluation-{number}.arrayrecord").write_bytes(data)
    (root / "manifest.json").write_text(json.dumps({"users": 5}))
    value = commit_to_users(b"key", "run", 1, tree_digest(root))
    return FolderCommitment("run", 1, value, b"key")


def _private(world: World, draw: random.Random) -> Attack:
    way = draw.choice(["damaged"] * 4 + ["removed", "renamed", "added", "swapped", "training"])
    place, other, seed = draw.randrange(5), draw.randrange(1, 5), draw.randrange(2**32)

    def act() -> str:
        sound = world.root / "people"
        sound.mkdir(exist_ok=True)
        commitment = _people(sound)
        folder = world.fresh() / "evaluation"
        shutil.copytree(sound, folder)
        paths = sorted(folder.glob("*.arrayrecord"))
        path = paths[place]
        if way == "damaged":
            path.write_bytes(damaged(path.read_bytes(), random.Random(seed))[1])
        elif way == "removed":
            path.unlink()
        elif way == "renamed":
            path.rename(folder / f"users-{place}.arrayrecord")
        elif way == "added":
            (folder / f"more-{seed}").write_bytes(b"" if seed % 2 else b"x")
        elif way == "swapped":
            first, second = path, paths[(place + other) % 5]
            data = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(data)
        else:
            commitment = FolderCommitment("run", 1, commitment.value, os.urandom(8))

        def read() -> None:
            with verified_copy(folder, commitment):
                pass

        return attempted(read, "it was opened")

    return Attack(f"{way}, file {place} and {other}, {seed % 10_000}", act)


# ---- public backbones ----------------------------------------------------------------------------


def _backbone(world: World, draw: random.Random) -> Attack:
    way = draw.choice(
        ["nan", "infinite", "damaged", "member", "bomb", "foreign tensor", "no config", "packed"]
    )
    place, seed = draw.randrange(4), draw.randrange(2**32)
    value = {"nan": np.nan, "infinite": draw.choice([np.inf, -np.inf])}.get(way, 0.5)
    member = draw.choice(["../x", "assets/x", "code.py", "/etc/x", "model.weights.h5.bak"])
    tensor = draw.choice(["seed_generator/vars/0", "optimizer/vars/0", "data", "layers/x/state"])

    def act() -> str:
        path = world.fresh() / "backbone.keras"
        weights = io.BytesIO()
        with h5py.File(weights, "w") as file:
            values = np.full((2, 2), 0.5, np.float32)
            values.flat[place] = value
            file["layers/dense/vars/0"] = values
            if way == "foreign tensor":
                file[tensor] = values
        packing = zipfile.ZIP_DEFLATED if way == "packed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", packing) as archive:
            if way != "no config":
                archive.writestr("config.json", "[" * 99_999 if way == "bomb" else "{}")
            archive.writestr("metadata.json", "{}")
            archive.writestr("model.weights.h5", weights.getvalue())
            if way == "member":
                archive.writestr(member, "x")
        if way == "damaged":
            data = path.read_bytes()
            path.write_bytes(data[: 1 + seed % (len(data) - 1)])

        def take() -> str:
            sha = file_digest(path)
            expected = Tensor.model_validate({"name": "layers/dense/vars/0", "shape": [2, 2]})
            return tensor_problem(stored_tensors(path, sha), [expected]) or ""

        problem: list[str] = []
        found = attempted(lambda: problem.append(take()))
        return "" if problem and problem[0] else found

    detail = {"member": member, "foreign tensor": tensor}.get(
        way, f"{place}, {seed % 1000}, {value}"
    )
    return Attack(f"{way}: {detail}", act)


KINDS = (
    Kind("changed bundles", _bundle, 60),
    Kind("bundles signed again", _signed, 20),
    Kind("changed ledgers", _ledger, 30),
    Kind("exchanged private folders", _private, 40),
    Kind("public backbones", _backbone, 12),
)
