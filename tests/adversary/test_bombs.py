"""Small files that expand without end are rejected unread or read within limits."""

import io
import json
import os
import zipfile
from pathlib import Path

import h5py
import pytest

from fedemb.documents.model import stored_tensors
from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import LARGEST_JSON, file_digest, limited_digest, strict_json
from tests.kit.pipeline_runs import honest_run
from tests.kit.process import python
from tests.kit.verified import problems_of

GIGABYTE = 1 << 30


INSPECT_SCRIPT = """
import os, re, resource, sys
from pathlib import Path
from fedemb.errors import FedEmbError

def bytes_read():
    return int(re.search(r"rchar: (\\d+)", Path("/proc/self/io").read_text())[1])

path, *trust = map(Path, sys.argv[1:])
if trust:
    from fedemb.pipelines.cli.options import require_released as look
else:
    from fedemb.documents.model import stored_tensors
    from fedemb.foundation.canonical_json import file_digest
    look = lambda path: stored_tensors(path, file_digest(path))
before, started = bytes_read(), sum(os.times()[:4])
try:
    look(path, *trust)
    said = "taken"
except FedEmbError as error:
    said = str(error)
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
peak = max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
print(peak, sum(os.times()[:4]) - started, bytes_read() - before, said)
"""
"""Looks at a model file, or at a bundle as `embed` does first.

Prints the most bytes that it, or the child it looked with, ever had, seconds of both, bytes read
and the error. Runs in a new process, because a process inherits the peak memory of its parent.
"""


def _inspect_in_process(*paths):
    peak, seconds, read, said = python("-c", INSPECT_SCRIPT, *paths).split(maxsplit=3)
    return int(peak), float(seconds), int(read), said


def _keras(path, weights, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps({"compile_config": None}))
        archive.writestr("model.weights.h5", weights)


def _huge_tensor(path, **how):
    """8 GB of one number, which HDF5 writes as nothing at all."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("layers/conv2d_0/vars/0", shape=(1 << 31,), dtype="f4", **how)
    _keras(path, buffer.getvalue())


def _zip_bomb(path):
    _keras(path, bytes(2 * GIGABYTE), zipfile.ZIP_DEFLATED)


def _nested_config(path):
    honest_run.write_model_file(path)
    with zipfile.ZipFile(path) as archive:
        weights = archive.read("model.weights.h5")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "[" * 100_000 + "]" * 100_000)
        archive.writestr("model.weights.h5", weights)


BOMBS = {
    "tensor of nothing": _huge_tensor,
    "tensor in chunks": lambda path: _huge_tensor(path, chunks=(1 << 20,)),
    "packed tensor": lambda path: _huge_tensor(path, chunks=(1 << 20,), compression="gzip"),
    "packed member": _zip_bomb,
    "nested settings": _nested_config,
}


@pytest.mark.long
@pytest.mark.parametrize("bomb", BOMBS)
def test_model_file_bomb_is_refused_within_memory_and_time_limits(tmp_path, bomb):
    path = tmp_path / "backbone.keras"
    BOMBS[bomb](path)
    assert path.stat().st_size < 8 << 20
    peak, seconds, _, said = _inspect_in_process(path)
    assert "backbone.keras" in said
    assert peak < 2 * GIGABYTE
    assert seconds < 30


def test_crashed_inspection_process_refuses_the_model_file(tmp_path, monkeypatch):
    """What no rule foresees ends with the process that looked."""
    from fedemb.documents import model

    path = tmp_path / "backbone.keras"
    honest_run.write_model_file(path)
    hungry = tmp_path / "hungry.py"
    hungry.write_text(
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({GIGABYTE}, {GIGABYTE}))\n"
        "bytes(8 << 30)\n"
    )
    run = model.subprocess.run
    monkeypatch.setattr(
        model.subprocess,
        "run",
        lambda command, **more: run([command[0], str(hungry)], **{**more, "check": False}),
    )
    with pytest.raises(ArtifactError, match="not a backbone"):
        stored_tensors(path, "0" * 64)


def test_bundle_signature_is_checked_before_its_model_is_parsed(bundle, monkeypatch):
    """Manifest and signature first: neither a model nor a document of it is parsed."""
    from fedemb.documents import evidence

    folder, trust = bundle
    _huge_tensor(folder / "backbone.keras")
    looked = []
    monkeypatch.setattr(evidence, "stored_tensors", lambda *words: looked.append(words))
    (problem,) = problems_of(str(folder), trust)
    assert "the manifest lists" in problem
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["backbone.keras"] = file_digest(folder / "backbone.keras")
    manifest["sizes"]["backbone.keras"] = (folder / "backbone.keras").stat().st_size
    text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n")
    (problem,) = problems_of(str(folder), trust)
    assert "signature of the release document does not match" in problem
    assert not looked


LARGE = {
    "newlines": ("ledger.jsonl", 0),
    "sparse ledger": ("ledger.jsonl", 3 << 30),
    "sparse weights": ("backbone.keras", 40 << 30),
    "sparse saved model": ("saved_model/saved_model.pb", 3 << 30),
}
"""File of a bundle, and the size that it is given as a hole; 0: full of newlines."""


@pytest.mark.long
@pytest.mark.parametrize("claimed", [False, True], ids=["", "claimed"])
@pytest.mark.parametrize("attack", LARGE)
def test_oversized_bundle_file_is_refused_within_memory_and_time_limits(bundle, attack, claimed):
    """Claimed: the manifest names the size, and its signature does not fit any more."""
    (folder, trust), (name, size) = bundle, LARGE[attack]
    if size:
        os.truncate(folder / name, size)
    else:
        (folder / name).write_bytes(b"\n" * (300 << 20))
    if claimed:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sizes"][name] = (folder / name).stat().st_size
        text = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False)
        (folder / "manifest.json").write_text(text + "\n")
    peak, seconds, read, said = _inspect_in_process(folder, trust)
    assert "taken" not in said
    assert peak < GIGABYTE // 2
    assert seconds < 10
    assert read < GIGABYTE // 8  # at most one line of the ledger


def test_limited_digest_stops_at_the_size_limit_and_refuses_devices(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(1000))
    assert limited_digest(tmp_path / "weights", 1000) == file_digest(tmp_path / "weights")
    with pytest.raises(ArtifactError, match="expected 999 bytes"):
        limited_digest(tmp_path / "weights", 999)
    with pytest.raises(OSError, match="a device or a pipe"):
        limited_digest(Path("/dev/zero"), 1000)


@pytest.mark.parametrize("name", ["utility_report.json", "manifest.json"])
def test_oversized_json_document_in_a_bundle_is_refused(bundle, name):
    folder, trust = bundle
    with (folder / name).open("wb") as file:
        file.truncate(LARGEST_JSON + 1)
    (problem,) = problems_of(str(folder), trust)
    assert f"{name} of the bundle has" in problem


@pytest.mark.parametrize("same", [False, True], ids=["device", "same bytes"])
def test_symlink_in_a_bundle_is_refused(bundle, tmp_path, same):
    folder, trust = bundle
    card = folder / "README.md"
    (tmp_path / "outside").write_bytes(card.read_bytes())
    card.unlink()
    card.symlink_to(tmp_path / "outside" if same else "/dev/zero")
    (problem,) = problems_of(str(folder), trust)
    assert "not a regular file" in problem


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 50_000, "[" * 100 + "]" * 100, '{"a": 1, "a": 2}', "NaN"],
    ids=["lists", "objects", "too deep", "key twice", "no number"],
)
def test_json_with_deep_nesting_duplicate_keys_or_nan_is_refused(text):
    with pytest.raises(ArtifactError, match="not JSON as we write it"):
        strict_json(text.encode(), "x")
