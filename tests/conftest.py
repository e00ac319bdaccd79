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
shapes.install()  # before any package is imported

REPOSITORY = Path(__file__).parent.parent
KNOWN_BUGS = range(1, 24)
"""Numbers of the bugs in tests/planted_bugs/README.md that the suite plants, each at least once."""


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` drop any
def pytest_collection_modifyitems(config, items):
    if [Path(name).resolve() for name in config.args] == [REPOSITORY / "tests"]:
        planted = {
            n for item in items for mark in item.iter_markers("planted_bug") for n in mark.args
        }
        if missing := set(KNOWN_BUGS) - planted:
            raise pytest.UsageError(f"no test plants the bugs {sorted(missing)}")
    # The longest first: no worker is left alone with a whole pipeline at the end.
    items.sort(key=lambda item: "integration" not in item.path.parts)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real images; skips where they are not available."""
    folder = Path(os.environ.get("FEDEMB_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real images at {folder}; set FEDEMB_DATA to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def small_release(tmp_path_factory) -> Path:
    """Folder with `bundle` and `ledger` of a released model."""
    from tests.kit.pipeline_runs import small_release

    return small_release.make(tmp_path_factory.mktemp("small_release"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished training: read it, or change a copy."""
    from tests.kit.pipeline_runs.evaluation_run import shared_run

    return shared_run(tmp_path_factory.mktemp)


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished training that the test may change."""
    from tests.kit.pipeline_runs.evaluation_run import FinishedRun

    return FinishedRun(shutil.copytree(finished.root, tmp_path / "run"))


@pytest.fixture(scope="session")
def allowed_run(tmp_path_factory):
    """An honest run that the gate allowed: read it, or change a copy."""
    from tests.kit.pipeline_runs import honest_run

    return honest_run.start(tmp_path_factory.mktemp("allowed") / "run").until_gate().do("gate")


@pytest.fixture(scope="session")
def released_run(allowed_run, tmp_path_factory):
    """The same, released."""
    from tests.kit.pipeline_runs import honest_run

    return honest_run.copy_of(allowed_run, tmp_path_factory.mktemp("released") / "run").do(
        "release"
    )


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
