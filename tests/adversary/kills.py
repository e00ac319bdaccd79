"""Acts on a policy, each in a process of its own that is killed and then started again.

A child is forked with everything imported, so that a kill costs a second and not a minute. It dies
by SIGKILL, before the n-th of its operations on files. Clock and fresh keys are
fixed in it: an act that was killed and done again must leave the very bytes that it leaves when it
is not.

What may be lost to a kill is time. Between kill and repetition the ledger verifies, charges at
least what was started, and shows no release that is not whole.
"""

import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import yaml
from typer.testing import CliRunner

from fedemb.errors import FedEmbError
from fedemb.foundation.files import remove_leftovers
from fedemb.keys import LocalKeyStore, reservation_key_name
from fedemb.ledger import records
from fedemb.pipelines.cli.main import app
from fedemb.reports import lineage
from fedemb.storage import LocalStore
from tests.kit.pipeline_runs import honest_run

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod", "os.truncate"),
    *("os.symlink", "shutil.copyfile", "shutil.rmtree"),
}
NOW = datetime.now(UTC).replace(microsecond=0)


def _cli(*arguments: str, text: str | None = None) -> None:
    result = CliRunner().invoke(app, list(arguments), input=text)
    if result.exit_code:
        raise (
            result.exception
            if isinstance(result.exception, FedEmbError)
            else SystemExit(f"{result.exit_code}: {result.output}")
        )


def _stores(run: honest_run.HonestRun) -> tuple[str, ...]:
    return ("--ledger", run.ledger_uri, "--keys", run.keys_uri)


def _rotate(run: honest_run.HonestRun) -> None:
    _cli("ledger", "rotate-keys", *_stores(run), "--reason", "a year is over")


def _void(run: honest_run.HonestRun) -> None:
    _cli("ledger", "void", run.run_id, *_stores(run), "--reason", "the wrong week")


def _train(run: honest_run.HonestRun) -> None:
    """Up to the trainer's last act; it clears its folder as `run_attempt` does."""
    remove_leftovers(run.model)
    run.do_commit = lambda: None
    run.do_train()


Do = Callable[[honest_run.HonestRun], object]
STEPS: dict[str, Do] = {
    "plan": lambda run: run.do_plan(),
    "pretrain": lambda run: run.do_pretrain(),
    "reserve": lambda run: run.do_reserve(),
    "partition": lambda run: run.do_partition(),
    "train": _train,
    "commit": lambda run: run.do_commit(),
    "measure": lambda run: run.do_measure(),
    "account": lambda run: run.do_account(),
    "gate": lambda run: run.do_gate(),
    "release": lambda run: run.do_release(),
}
"""A run, in order."""
ACTS: dict[str, tuple[str, Do]] = {
    **{name: (name, STEPS[name]) for name in ("reserve", "commit", "account", "gate", "release")},
    "bind": ("train", lambda run: run.do_bind()),
    "void": ("partition", _void),
    "waive": ("release", lambda run: run.waive("no_gain_over_public")),
    "rotate": ("release", _rotate),
}
"""What is killed: before which step it is done, and how."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    status: int
    """Exit code, or minus the signal."""
    operations: int
    """On files, as far as it told."""
    text: str

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


class Counter:
    """Counts operations on files below a folder, and kills the process before one of them."""

    def __init__(self, root: Path, kill_at: int | None) -> None:
        self.root, self.kill_at, self.done = str(root), kill_at, 0

    def operation(self) -> None:
        self.done += 1
        if self.done == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & WRITING:
                return
        elif event not in EVENTS:
            return
        else:
            path = arguments[0]
        if isinstance(path, str | Path) and (
            str(path).startswith(self.root) or not str(path).startswith("/")
        ):
            self.operation()

    def arm(self) -> None:
        sys.addaudithook(self.audit)
        sync = os.fsync

        def counted(descriptor: int) -> None:
            self.operation()  # the written bytes are there, without a name yet
            sync(descriptor)

        os.fsync = counted


def _key_bytes(name: str) -> bytes:
    return sha256(name.encode()).digest()


def _fix(root: Path) -> None:
    """Clock and keys of a child: what it writes is a function of what it does."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    records.datetime = lineage.datetime = Fixed
    LocalStore.clock = lambda self: NOW
    create = LocalKeyStore.create
    LocalKeyStore.create = lambda self, name, key=None: create(self, name, key or _key_bytes(name))
    tempfile.tempdir = str(root / "tmp")


def in_child(root: Path, act: Do, *, kill_at: int | None = None) -> Outcome:
    """Does an act in a forked process.

    Args:
      root: folder of the run.
      act: what is done.
      kill_at: kills the process before its n-th operation on files, from 1.
    """
    (root / "tmp").mkdir(exist_ok=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status, text = 1, ""
        counter = Counter(root, kill_at)
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _fix(root)
            counter.arm()
            act(honest_run.at(root))
            status = 0
        except FedEmbError as error:
            status, text = error.exit_code, f"{type(error).__name__}: {error}"
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writing, json.dumps([counter.done, text])[:60_000].encode())
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    operations, text = json.loads(told) if told else (0, "")
    return Outcome(status, operations, text)


def start(root: Path) -> None:
    """A run of which nothing was done, its configuration and model."""
    run = honest_run.start(root)
    honest_run.write_model_file(run.model / "backbone.keras")  # a zip: it would tell the time
    (root / "settings.yaml").write_text(yaml.safe_dump(run.config.model_dump(mode="json")))


def warm(root: Path) -> None:
    """Does every step once in this process: what a child needs is imported before it is forked."""
    start(root)
    with redirect_stdout(io.StringIO()):
        for do in STEPS.values():
            do(honest_run.at(root))


def prepare(root: Path, acts: tuple[str, ...] = tuple(ACTS)) -> dict[str, Path]:
    """Copies of one run right before each act."""
    warm(root / "warm")
    now = root / "now"
    start(now)
    places: dict[str, Path] = {}
    for step, do in STEPS.items():
        for act in acts:
            if ACTS[act][0] == step:
                places[act] = _copy(now, root / act)
        outcome = in_child(now, do)
        assert outcome.status == 0, outcome.text
    return places


def visible(root: Path) -> dict[str, bytes]:
    """Every file that counts, wherever the run lies.

    Temporary names start with a dot, and `tmp` is shared.
    """
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        hidden = any(part.startswith(".") for part in name.parts) or name.parts[0] == "tmp"
        if path.is_file() and not hidden:
            data = path.read_bytes()
            found[name.as_posix()] = data.replace(str(root).encode(), b"ROOT")
    return found


def secrets_left(root: Path) -> list[str]:
    """Files that hold a key and are not the key store's, or hold one that was destroyed."""
    store = root / "policy" / "keys"
    keys = {
        path.read_bytes(): path
        for path in store.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.stat().st_size == 32
    }
    destroyed = _key_bytes(reservation_key_name("monday", 1))
    marked = store / f"{reservation_key_name('monday', 1)}.destroyed"
    found = []
    for path in root.rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if any(key in data for key in keys) and not path.is_relative_to(store):
            found.append(f"{path}: a key outside of its store")
        if marked.exists() and destroyed in data:
            found.append(f"{path}: a key that was destroyed")
    return found


def charge(root: Path) -> SimpleNamespace:
    """What the ledger says was spent; it must verify."""
    run = honest_run.at(root)
    if not (root / "policy" / "ledger" / "weekly" / "00000000.json").exists():
        return SimpleNamespace(attempts=0, rounds=0, epsilon=0.0, releases=0)
    ledger = run.ledger()
    ledger.verify()
    attempts = list(ledger.state.attempts.values())
    return SimpleNamespace(
        attempts=len(attempts),
        rounds=sum(attempt.charge.rounds_charged for attempt in attempts if attempt.charged),
        epsilon=ledger.spent("all/0").epsilon if attempts else 0.0,
        releases=sum(len(attempt.releases) for attempt in attempts),
    )


@dataclass(frozen=True)
class Killed:
    """One kill of an act, and what came of it."""

    point: int
    problems: tuple[str, ...]


def walk(act: str, place: Path, scratch: Path, points: range) -> Iterator[Killed]:
    """Kills an act before each of its operations on files, does it again, compares.

    Args:
      act: one of `ACTS`.
      place: the run right before it.
      scratch: folder for copies.
      points: which operations, from 1.
    """
    do = ACTS[act][1]
    before = charge(place)
    shutil.rmtree(scratch, ignore_errors=True)
    whole = _copy(place, scratch / "whole")
    unbroken = in_child(whole, do)
    assert unbroken.status == 0, unbroken.text
    wanted, after = visible(whole), charge(whole)
    for point in range(points.start, unbroken.operations + 1, points.step):
        root = _copy(place, scratch / "run")
        problems = []
        killed = in_child(root, do, kill_at=point)
        if not killed.killed:
            problems.append(f"not killed: {killed.status} {killed.text}")
        problems += between(root, before, after)
        again = in_child(root, do)
        if again.status:
            problems.append(f"refused when done again: {again.text}")
        try:
            found = charge(root)
        except FedEmbError as error:
            found = error
        if found != after:
            problems.append(f"charged {found}, expected {after}")
        problems += differences(act, visible(root), wanted) + secrets_left(root)
        yield Killed(point, tuple(problems))
        shutil.rmtree(root.parent)


def _copy(place: Path, parent: Path) -> Path:
    return Path(shutil.copytree(place, parent / "run"))


def between(root: Path, before: SimpleNamespace, after: SimpleNamespace) -> list[str]:
    """What is wrong after a kill, before anything was mended."""
    try:
        found = charge(root)
    except FedEmbError as error:
        return [f"the ledger does not hold after the kill: {error}"]
    problems = []
    if found not in (before, after):
        problems.append(f"the ledger says {found}, expected {before} or {after}")
    if (root / "releases" / "glyphs" / "1.0.json").exists():  # visible, so it must be whole
        seen = honest_run.at(root).problems()
        problems += [text for text in seen if text != "the ledger has no record of this release"]
    return problems


def differences(act: str, found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    """Files that are not what they would be without the kill."""
    if act == "rotate":  # done again it may make a further generation: compared by its effect
        return []
    return [
        f"{name} is {'other' if name in found and name in wanted else 'missing or extra'}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]


def main(folder: str, step: str, *acts: str) -> None:
    """Walks acts in steps of so many operations; prints a JSON line for each kill."""
    root, chosen = Path(folder), acts or tuple(ACTS)
    places = prepare(root, chosen)
    for act in chosen:
        points = range(1, 1_000_000, int(step))
        for killed in walk(act, places[act], root / "scratch" / act, points):
            line = {"act": act, "point": killed.point, "problems": killed.problems}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
