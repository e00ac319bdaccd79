"""A bundle that a killed release left in place is reused as it is, if it is ours."""

import pytest

from fedemb.errors import SignatureInvalid
from fedemb.storage.local import LocalStore
from tests.kit.pipeline_runs import honest_run

MARKER = "glyphs/1.0.json"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed between tree and marker."""
    run = honest_run.start(tmp_path_factory.mktemp("killed")).until_gate()
    run.do_gate()
    create = LocalStore.create

    def fatal(self, name, data):
        if name == MARKER:
            raise KeyboardInterrupt
        return create(self, name, data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalStore, "create", fatal)
        with pytest.raises(KeyboardInterrupt):
            run.do_release()
    return run


@pytest.mark.parametrize("name", ["README.md", "privacy_report.html"])
def test_changed_tree_is_not_taken_over(killed, name):
    releases = killed.root / "releases"
    path = releases / "glyphs" / "1.0" / name
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"e", b"f", 1))
    with pytest.raises(SignatureInvalid, match="differs from the manifest"):
        killed.do_release()
    assert not (releases / MARKER).exists()
    path.write_bytes(whole)


def test_whole_tree_is_taken_over(killed):
    killed.do_release()
    assert (killed.root / "releases" / MARKER).exists()
    assert killed.problems() == []
