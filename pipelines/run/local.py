"""Runs the pipeline on this machine under kfp's SubprocessRunner, and watches it.

kfp runs in a process of its own (`python -m fedemb.pipelines.run.local RUN`), whose output goes to
the run's log; this side reads the events in it, shows them, and passes Ctrl-C on as a request to
stop after the current round, and so it does when its terminal is closed. If this side is killed,
the other one asks its step to stop.

Steps that a resumed run reuses: training is charged once, evaluations may be repeated.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.errors import (
    AwaitingApproval,
    ConfigError,
    FedEmbError,
    InputError,
    Interrupted,
    Refused,
)
from fedemb.foundation.files import open_log
from fedemb.ledger import read_reservation
from fedemb.pipelines.run.directory import (
    RunDirectory,
    RunState,
    ledger_of,
    signed_plan,
    signed_report,
    signed_utility,
)
from fedemb.pipelines.run.load_config import overridden
from fedemb.pipelines.steps import PIPELINE
from fedemb.privacy.section import UNITS
from fedemb.reports.privacy_text import all_runs, guarantee_lines, protection
from fedemb.reports.utility_text import utility_sentence
from fedemb.storage import join
from fedemb.training.noise_warnings import forecast


def reused_steps(run: RunDirectory, start: str | None) -> tuple[str, ...]:
    """The steps that do not run again.

    Args:
      run: the run directory.
      start: the first step to run again. None reuses the finished steps that run once,
        such as the training, with all they rest on, and runs the others: they are cheap.

    Raises:
      InputError: the step does not exist, or an earlier step has not finished.
    """
    pipeline = PIPELINE
    finished = set(run.read_state().seconds)
    if start is None:
        ancestors = pipeline.ancestors()
        taken: set[str] = set()
        for step in pipeline.declared():
            whole = {step.name, *ancestors[step.name]}
            if (step.once or step.cached) and whole <= finished:
                taken |= whole
        return tuple(name for name in pipeline.steps if name in taken)
    if start not in pipeline.steps:
        raise InputError(f"Unknown step --from {start}. Pass one of {', '.join(pipeline.steps)}.")
    before = pipeline.steps[: pipeline.steps.index(start)]
    for name in before:
        if name not in finished:
            raise InputError(
                f"--from {start}: {name} has not finished in this run; resume it without --from "
                "first"
            )
    return before


def reused_paths(run: RunDirectory, steps: Sequence[str]) -> dict[str, dict[str, str]]:
    """Step -> output -> path of the reused steps, and the configuration as it is now.

    Raises:
      InputError: an output is gone.
    """
    paths: dict[str, dict[str, str]] = {}
    for step in PIPELINE.declared():
        if step.name in steps:
            paths[step.name] = dict.fromkeys(step.texts, run.config().model_dump_json())
            for name in step.files:
                path = run.output(name, step.name)
                if path is None:
                    raise InputError(
                        f"{name} of {step.name} is gone from {run.public}; run the step again with "
                        f"--from {step.name}"
                    )
                paths[step.name][name] = str(path)
    return paths


def changed_config(run: RunDirectory, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration of a run with other free sections.

    The steps refuse other people, and reports of another section.

    Raises:
      LedgerError: the run is reserved, and not in the ledger that is named now.
      ConfigError: a section that the reservation binds would change, or a release would take the
        name of the one before.
    """
    before = run.config()
    after = overridden(before, overrides)
    changed = {
        name: getattr(after, name)
        for name in RunConfig.model_fields
        if getattr(before, name) != getattr(after, name)
    }
    if bound := [name for name in changed if name not in FREE_SECTIONS]:
        raise ConfigError(
            f"The budget of run {run.run_id} was reserved for another {', '.join(bound)}. "
            f"Change only {', '.join(FREE_SECTIONS)}, or start a run with a new id."
        )
    after = before.model_copy(update=changed)  # sections that the reservation binds, as written
    reservation, stores = run.output("reservation"), (run.stores(after), run.stores())
    if reservation is not None and stores[0]["ledger"] != stores[1]["ledger"]:
        ledger_of(run, after).attempt(read_reservation(reservation))
    published = run.document("release") or {}
    name = after.released_as(run.run_id)
    if (published.get("name"), published.get("version")) == name:
        raise ConfigError(
            f"run {run.run_id} has released {' '.join(name)}, and a release does not change; name "
            "another version with --set release.version=..."
        )
    return after


EVENT = re.compile(r"fedemb-event: (\{.*\})")
WARNING = re.compile(r"WARNING fedemb[\w.]*: (.*)")
ROUND = re.compile(r"INFO fedemb\.training[\w.]*: round (\d+)/(\d+)")
HEARTBEAT = 60.0
"""Seconds between lines about a step that reports no rounds."""
RECENT = 16
"""Number of rounds used to estimate the remaining time; the first rounds compile."""


Status = Literal["started", "progress", "finished", "failed", "reused", "note"]


def run_pipeline(run: RunDirectory, view: View, taken_over: Sequence[str] = ()) -> RunState:
    """Runs or resumes the pipeline of a run directory and returns how it ended.

    The steps in `taken_over` do not run again.

    Nothing is retried. After Ctrl-C, SIGTERM or a closed terminal the running step is asked to stop
    (the trainer finishes its round); a second Ctrl-C ends it at once. Either way the run can be
    resumed.
    """
    finished, pace = run.read_state().seconds, TimeLeft()
    state = RunState(exit_code=1, seconds={name: finished[name] for name in taken_over})
    run.write_state(state)
    for step in taken_over:
        view.show("reused", step)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "fedemb.pipelines.run.local", str(run.root), *taken_over]
    with (
        TextIOWrapper(open_log(run.log), encoding="utf-8", write_through=True) as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        stop = _StopOnInterrupt(child)
        assert child.stdout is not None  # PIPE above
        with stop, _beating(view, stop):
            for line in child.stdout:
                log.write(line)
                if _follow(line, state, view, stop, pace) == "step_finished":
                    run.write_state(state)  # reused, even if this process is killed
        code = child.wait()
    if code == 0:
        state.exit_code = 0
    elif state.failed_step is None:
        state.exit_code = Interrupted.exit_code if stop.requested else 1
        state.message = (
            "stopped on request"
            if stop.requested
            else (
                f"the pipeline ended with code {code} and no step reported an error; read {run.log}"
            )
        )
    run.write_state(state)
    return state


def _follow(
    line: str, state: RunState, view: View, stop: _StopOnInterrupt, pace: TimeLeft
) -> str | None:
    """Shows a line of the log; returns the kind of event it told, if any."""
    if found := EVENT.search(line):
        event = json.loads(found.group(1))
        step = event["step"]
        match event["kind"]:
            case "step_started":
                stop.pid, stop.step, stop.since = event["pid"], step, time.monotonic()
                view.show("started", step)
            case "step_finished":
                stop.pid = None
                state.seconds[step] = event["seconds"]
                view.show("finished", step, f"{event['seconds']:.1f} s")
            case "step_failed":
                stop.pid = None
                state.failed_step, state.error = step, event["error"]
                state.message, state.exit_code = event["message"], event["exit_code"]
                view.show("failed", step, event["message"])
            case _:
                pass
        return event["kind"]
    elif found := ROUND.search(line):
        ended, rounds = map(int, found.groups())
        view.show("progress", stop.step, f"round {ended}/{rounds}, {pace.left(ended, rounds)}")
    elif found := WARNING.search(line):
        view.show("note", stop.step, found.group(1))
    return None


@contextmanager
def _beating(view: View, stop: _StopOnInterrupt) -> Generator[None]:
    """While entered, shows for how long a step has been running that reports nothing else."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT / 4):
            now = time.monotonic()
            if stop.pid is not None and now - max(stop.since, view.last_progress) >= HEARTBEAT:
                view.show("progress", stop.step, f"running for {(now - stop.since) / 60:.0f} min")

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class TimeLeft:
    """Estimates the remaining time of a training for its user; the training itself must not log it.

    The first rounds may also compute features, so they say less about the rest than recent ones.
    """

    def __init__(self) -> None:
        self._ended: list[tuple[int, float]] = []

    def left(self, ended: int, rounds: int) -> str:
        """Returns the remaining time as text, after a round has ended."""
        self._ended.append((ended, time.monotonic()))
        if ended >= rounds:
            return "done"
        (first, then), (_, now) = self._ended[-1 - RECENT :][0], self._ended[-1]
        if ended <= first:
            return "time left unknown"
        return _rounded((now - then) / (ended - first) * (rounds - ended))


def _rounded(seconds: float) -> str:
    if seconds >= 90:
        return f"about {round(seconds / 60)} min left"
    return f"about {max(1, round(seconds / 10)) * 10} s left"


class _StopOnInterrupt:
    """While entered, Ctrl-C asks the running step to stop instead of killing this process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        self.pid: int | None = None
        self.step = ""
        """The step that started last."""
        self.since = 0.0
        """When it started."""
        self.requested = False

    def __enter__(self) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else it was started by nohup
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            _say_no_more()
            # Shell and kernel both say that a terminal is closed, perhaps after the step ended.
            self._previous[signal.SIGHUP] = signal.SIG_IGN
            if self.requested:
                return
        before, self.requested = self.requested, True
        with suppress(ProcessLookupError):
            if self.pid is not None and not before:
                os.kill(self.pid, signal.SIGTERM)
                return
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


def _say_no_more() -> None:
    """Redirects output: writing to a closed terminal or pipe would end this process."""
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        for descriptor in (1, 2):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.dup2(nowhere.fileno(), descriptor)


class View:
    """Display of a run: one line per event."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.last_progress = 0.0

    def show(self, status: Status, step: str, text: str = "") -> None:
        """Shows what happened to a step; at most one line of progress in five seconds.

        Args:
          status: `reused`: it finished earlier in this run; `note`: it reports a warning.
          step: name of the step.
          text: duration, error, warning, or a line of public progress.
        """
        now = time.monotonic()
        if status == "progress":
            if now - self.last_progress < 5:
                return
            self.last_progress = now
        lines: dict[Status, str] = {
            "started": f"{step} ...",
            "progress": f"{step}: {text}",
            "finished": f"{step} done in {text}",
            "failed": f"{step} stopped: {text}",
            "reused": f"{step} reused: it finished before",
            "note": f"note: {text}",
        }
        self.write(lines[status])


# ---- what a finished run says -----------------------------------------------------------------


def closing_lines(run: RunDirectory, state: RunState) -> list[str]:
    """The lines every run ends with: guarantee, utility, what was measured before, release."""
    return [
        f"guarantee: {_known(lambda: _guarantee(run))}",
        f"utility: {_known(lambda: _utility(run))}",
        f"forecast: {_known(lambda: forecast(run.config()))}",
        f"release: {_release(run, state)}",
    ]


def _known(line: Callable[[], str]) -> str:
    """Returns a line, or why it is unknown; errors must not hide how the run ended."""
    try:
        return line()
    except FedEmbError as error:
        return f"not known ({error})"


def _guarantee(run: RunDirectory) -> str:
    report = signed_report(run) if run.config().purpose == "release" else None
    if report is None:
        return "; ".join(guarantee_lines(None, signed_plan(run)))
    return "; ".join(filter(None, (protection(report.body)[:-1], all_runs(report.body))))


def _utility(run: RunDirectory) -> str:
    signed = signed_utility(run)
    if signed is None:
        return "not measured"
    policy, many = run.config().policy.policy_id, UNITS[run.config().policy.unit].many
    evaluations = len(ledger_of(run).state.evaluations)
    return (
        f"{utility_sentence(signed.body)} Measurements on these {many} so far, "
        f"under policy {policy}: {evaluations}."
    )


def _release(run: RunDirectory, state: RunState) -> str:
    if state.exit_code == Refused.exit_code:
        keys = shlex.quote(run.stores()["keys"])  # completes the command of a waiver
        message = (state.message or "").replace("--keys KEYS", f"--keys {keys}")
        return f"refused: {message}".replace("fedemb approve RUN", f"fedemb approve {run.named}")
    if state.exit_code == AwaitingApproval.exit_code:
        return f"waiting for approval: {state.message}"
    if state.exit_code != 0:
        return f"none ({state.failed_step or 'the pipeline'} stopped: {state.message})"
    found = run.document("release")
    name = f"{found['name']}/{found['version']}" if found else ""
    return join(run.stores()["releases"], name) if name else "none (simulation)"


def iter_runs(parent: Path) -> Iterator[RunDirectory]:
    """Runs below a folder, newest first."""
    found = [path.parent for path in parent.glob("*/config.yaml")]
    for path in sorted(found, key=lambda item: item.stat().st_mtime, reverse=True):
        yield RunDirectory(path.resolve())


# ---- the kfp side -----------------------------------------------------------------------------


def _end_with_parent() -> None:
    """Asks the running step to stop when the process that watches it was killed (on Linux)."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)  # it is of the group, too
        os.killpg(0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    if sys.platform == "linux":
        pr_set_pdeathsig, parent = 1, os.getppid()
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel knew whom to tell
            stop()


def _execute(run: RunDirectory, taken_over: Sequence[str]) -> None:
    """Runs the pipeline with kfp in this process."""
    from kfp import local

    from fedemb.pipelines.graph import build_pipeline, pipeline_arguments
    from fedemb.pipelines.steps import PIPELINE

    config = run.config()
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(run.public),
        raise_on_error=True,
        enable_caching=True,
    )
    arguments = pipeline_arguments(config, **run.stores(), beam_options=run.beam_options())
    paths = reused_paths(run, taken_over)
    build_pipeline(PIPELINE, run.run_id, paths)(**arguments)


if __name__ == "__main__":
    _end_with_parent()
    try:
        _execute(RunDirectory.open(Path(sys.argv[1])), sys.argv[2:])
    except FedEmbError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except RuntimeError as error:  # kfp's word for a failed task; the step has said why
        sys.exit(str(error))
