"""A local run that is stopped from outside: its state, and the processes that continue."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fedemb.errors import InputError
from fedemb.pipelines.run.directory import RunDirectory, RunState
from tests.kit.cli import fedemb
from tests.kit.pipeline_runs import honest_run

WATCHED = """#!{python} -u
# Stands for kfp and its step: of a step that ends at once, a last word, and then nothing.
import json, os, signal, subprocess, sys, time
def say(kind, **fields):
    print("fedemb-event:", json.dumps(dict(kind=kind, step="train_model", **fields)))
def failed(error, code):
    say("step_failed", error=error, message="m", exit_code=code)
def stop(*_):
    failed("Interrupted", 5)
    sys.exit(1)
case = {case!r}
if case == "continues":
    signal.signal(signal.SIGTERM, stop)
    say("step_started", pid=os.getpid())
else:
    gone = subprocess.Popen(["true"])
    gone.wait()
    say("step_started", pid=gone.pid)
    if case == "failed":
        failed("StorageError", 4)
time.sleep(300)
"""
WATCHING = """
import signal, sys
from pathlib import Path
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.local import View, run_pipeline
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
sys.executable = sys.argv[2]
run_pipeline(RunDirectory(Path(sys.argv[1])), View(lambda text: print(text, flush=True)))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "word", "wanted"),
    [
        ("continues", [signal.SIGTERM], ("Interrupted", 5)),
        ("continues", [signal.SIGHUP, signal.SIGHUP], ("Interrupted", 5)),
        ("failed", [signal.SIGTERM], ("StorageError", 4)),
        ("was killed", [signal.SIGTERM], (None, 5)),
    ],
)
def test_stopped_run_reports_the_outcome_of_its_step(tmp_path, case, word, wanted):
    watched = tmp_path / "watched"
    watched.write_text(WATCHED.format(python=sys.executable, case=case))
    watched.chmod(0o755)
    run = RunDirectory(tmp_path / "one")
    run.root.mkdir()
    settings = honest_run.config().model_dump(mode="json", exclude_defaults=True)
    (run.root / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-c", WATCHING, str(run.root), str(watched)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = "stopped: m" if case == "failed" else "train_model ..."
        for line in process.stdout:
            if last in line:
                break
        if signal.SIGHUP in word:
            process.stdout.close()  # as a closed terminal is
        for number in word:
            process.send_signal(number)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert run.log.stat().st_mode & 0o777 == 0o600
    state = run.read_state()
    assert (state.error, state.exit_code) == wanted


PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(300)
"""
CHILD = """
import subprocess
from fedemb.pipelines.run.local import _end_with_parent
_end_with_parent()
step = subprocess.Popen(["sleep", "300"])
print(step.pid, flush=True)
step.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_killed_run_stops_its_step():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        step = process.stdout.readline().strip()
        deadline = time.monotonic() + 60
        # Python checks for signals between its instructions: one that comes after the last look and
        # before the child waits in the kernel is seen only once the step ends.
        child = _of(step)[1]
        while _of(child)[0] != "S":
            assert time.monotonic() < deadline
        process.kill()
        while _of(step)[0] not in ("Z", "gone"):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _of(process: str) -> tuple[str, str]:
    """State of a process, and who its parent is."""
    try:
        state, parent, *_ = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "gone", ""
    return state, parent


def test_running_run_is_not_started_twice(tmp_path):
    run = RunDirectory.create(tmp_path, "one", honest_run.config())
    again = ["run", "--resume", str(run.root), "--beam=--runner=X"]
    sentence = "is running already, in another `fedemb run`; nothing was changed"
    with run.alone():
        with pytest.raises(InputError, match=sentence):
            fedemb(*again)
        with pytest.raises(InputError, match=sentence):
            run.alone().__enter__()
    assert run.beam_options() == ()
    assert run.read_state() == RunState()
    with run.alone():
        pass
