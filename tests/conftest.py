"""Fixtures that several parts share."""

import inspect
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.kit import shapes

# What `configure_threads` gives a step's own process: bits depend on it, and here TensorFlow runs
# before a step may ask for it.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 8 << 30:
    # Ledger and stores wait for the disk at each record: half of the time of many tests.
    os.environ.setdefault("TMPDIR", str(MEMORY))
shapes.install()  # before any room is imported

from fedemb.runtime import planted_bug_suite  # noqa: E402
from fedemb.runtime.provenance import privacy_code_digest  # noqa: E402

REPOSITORY = Path(__file__).parent.parent
_PLANTED = pytest.StashKey[set[int]]()


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` drop any
def pytest_collection_modifyitems(config, items):
    if [Path(name).resolve() for name in config.args] == [REPOSITORY / "tests"]:
        marks = [{mark.name for mark in item.iter_markers()} for item in items]
        whole = [names for names in marks if "planted_bug" in names and "slow" not in names]
        quick = [names for names in whole if "mutation" not in names]
        config.stash[_PLANTED] = {len(whole), len(quick)}
    # The longest first: no worker is left alone with a whole pipeline at the end.
    items.sort(key=lambda item: "integration" not in item.path.parts)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real images; skips where they are not available."""
    folder = Path(os.environ.get("FEDEMB_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}; set FEDEMB_DATA to the folder that holds them")
    return folder


@pytest.fixture(scope="session", autouse=True)
def planted_bugs_are_found(tmp_path_factory):
    """A record for this code, so that a stale one stops only those tests that start the real thing.

    The packaged record is compared by tests/planted_bugs/test_planted_bug_record.py.
    """
    record = tmp_path_factory.mktemp("planted_bugs") / "record.json"
    planted_bug_suite.write_record(
        record, passed=50, total=50, privacy_code_sha=privacy_code_digest()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted_bug_suite, "RECORD", record)
        yield


@pytest.fixture(scope="session", autouse=True)
def callers_are_named_quickly():
    """KFP asks for all callers and their sources, at each setting of a task, to learn one name.

    Among the modules of a whole suite that is 0.1 s each and nine tenths of a compilation.
    """

    def callers(context=1):
        del context
        frame, found = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            found.append(
                inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
            )
            frame = frame.f_back
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", callers)
        yield


@pytest.fixture
def planted_bugs_collected(request) -> set[int]:
    """How many tests a record may count: of `make planted-bugs`, and of its quick part.

    Skips unless all tests were collected.
    """
    if _PLANTED not in request.config.stash:
        pytest.skip("only some tests were collected, so how many plant a bug is not known")
    return request.config.stash[_PLANTED]
