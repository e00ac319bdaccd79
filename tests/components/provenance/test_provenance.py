"""A reservation and the record of the planted bugs bind what decides privacy, and nothing else."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.errors import ArtifactError, ConfigError
from fedemb.foundation.canonical_json import canonical_json, strict_json
from fedemb.foundation.document import Written
from fedemb.runtime import provenance
from tests.kit.pipeline_runs.honest_run import config


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, as a wheel lays it out, that may be changed."""
    root = tmp_path / "fedemb"
    names = shutil.ignore_patterns("__pycache__", "pipelines", "*.ipynb")
    shutil.copytree(provenance.ROOT, root, ignore=names)
    monkeypatch.setattr(provenance, "ROOT", root)
    _forget()
    yield root
    monkeypatch.undo()
    _forget()


BOUND = (
    "config/run.py",
    "data/identity.py",
    "training/units.py",
    "foundation/canonical_json.py",
    "keys/stores.py",
    "models/keras_backend.py",
    "partition/prepare.py",
    "steps/partition_users.py",
    "steps/reserve_budget.py",
    "steps/train_model.py",
    "storage/base.py",
    "training/trainer.py",
)
"""A file of each package, and each step, that no other row names."""


def _forget():
    for cached in (provenance.privacy_code_digest, provenance._user_digest):
        cached.cache_clear()


def test_a_wheel_has_the_digest_of_its_checkout(package):
    copied = provenance.code_digest()
    provenance.ROOT = Path(provenance.__file__).parents[1]
    _forget()
    assert provenance.code_digest() == copied


@pytest.mark.parametrize(
    ("name", "change", "bound"),
    [
        ("privacy/noise.py", lambda text: f"# more\n{text}", False),
        ("privacy/noise.py", lambda text: text.replace('"""', '"""Now: ', 1), False),
        ("privacy/noise.py", lambda text: f"{text}\nMORE = 1\n", True),
        ("ledger/budget.py", lambda text: text.replace(" / 2", " / 1", 1), True),
        *((name, lambda text: f"{text}\nMORE = 1\n", True) for name in BOUND),
        ("evaluation/metrics.py", lambda text: f"{text}\nMORE = 1\n", False),
        ("steps/release_model.py", lambda text: f"{text}\nMORE = 1\n", False),
        ("reports/templates/style.css", lambda text: f"{text}\n", False),
        ("requirements/gpu.txt", lambda text: text.replace("==", "==1", 1), True),
        ("requirements/docs.txt", lambda text: f"{text}\n", False),
    ],
)
def test_code_digest_covers_exactly_the_bound_files(package, name, change, bound):
    before, path = provenance.code_digest(), package / name
    path.write_text(change(path.read_text()))
    _forget()
    assert (provenance.code_digest() != before) == bound


@pytest.mark.parametrize(
    ("backbone", "changed"),
    [("my_backbones:tiny", "my_backbones.py"), ("my_models.nets:tiny", "my_models/deep/blocks.py")],
    ids=["module", "package"],
)
def test_code_of_the_users_own_is_bound_whole(tmp_path, monkeypatch, backbone, changed):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_models" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "nets.py", "deep/blocks.py"):
        (tmp_path / "my_models" / name).write_text("")
    (tmp_path / "my_backbones.py").write_text("")
    own = config(**{"model.backbone": backbone})
    before = provenance.code_digest(own)
    assert before != provenance.code_digest()
    (tmp_path / changed).write_text("WIDTH = 1\n")
    _forget()
    assert provenance.code_digest(own) != before


@pytest.mark.parametrize("name", ["no_such_module_here:tiny", ":tiny", "../up:tiny"])
def test_a_module_that_is_not_installed_is_refused(name):
    with pytest.raises(ConfigError, match="not installed here"):
        provenance.code_digest(config(**{"model.backbone": name}))


def test_digest_of_a_source_is_the_same_on_every_python():
    """A record made on one version is of the same code on another."""
    source = (
        "class A(B, c=1):\n    x: int\n\n    async def f(self, *a, b=None, **c) -> str:\n"
        '        """Text."""\n        return f"{a!r:>8} and {c}" or (lambda: [])()\n'
    )
    digest = "12d4a043f9e8ac3a3d6f7bcef6dff6ed43c1c77458931f05e2475ac7c3045df2"
    assert provenance._tree_digest(source.encode()) == digest  # taken on 3.11, 3.12 and 3.13


# ---- Bytes that a signature covers, and the exact form of signed documents ----


SIGNATURE = {"key_id": "k" * 32, "algorithm": "ed25519", "value": 'a"\\\u00e9'}
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


class Compact:
    """Stands for a document that is written in one line."""

    compact = True

    def __init__(self, content):
        self._content = content

    def content(self):
        return self._content


@given(st.dictionaries(NAMES.filter(lambda name: name != "signature"), VALUES, max_size=6))
@pytest.mark.parametrize("signature", [SIGNATURE, None])
def test_signed_bytes_are_canonical_json_of_content(signature, content):
    whole = content if signature is None else {**content, "signature": signature}
    written = Written(Compact(content), signature, canonical_json(whole))
    assert written.signed_bytes == canonical_json(content)
    assert written.is_exact
    assert not Written(Compact(content), signature, written.data + b" ").is_exact


@pytest.mark.parametrize("depth", [64, 65, 70])
def test_json_depth_is_limited(depth):
    data = b"[" * depth + b"]" * depth
    if depth <= 64:
        strict_json(data, "list")
    else:
        with pytest.raises(ArtifactError):
            strict_json(data, "list")
    assert strict_json(b'["' + b"[{" * 90 + b'"]', "text") == ["[{" * 90]
