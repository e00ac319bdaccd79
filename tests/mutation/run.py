"""Tries mutants, keeps what became of each, and goes on where the last run stopped.

    python -m tests.mutation.run MUTANTS.jsonl [--minutes 60] [--results FILE]

One process for each group of tests imports and collects them once. A first pass notes which
functions of the product each test calls and how long it takes. Each mutant is then tried in a
forked child: the code of the changed function is replaced in place, and the tests that call it run,
the quickest first, until one fails or their time is spent. A change outside of functions is tried
on a copy of the product.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.jsonl")
PRIVACY, GATE, LEDGER = (f"tests/components/{room}" for room in ("privacy", "gate", "ledger"))
EMBEDDING, TRAINING = "tests/components/embedding", "tests/components/training"
PLANTED = "tests/planted_bugs/test_planted_bugs.py"
ENGINE = (
    *("backend_rounds", "client_draws", "local_training", "round_audit", "round_kind"),
    *("round_loop", "round_replay", "rounds", "side_by_side", "unit_gradient"),
)
"""Modules of the rounds on TensorFlow. Tests of those on JAX run in processes of their own, where a
function that was replaced here is not the one that runs."""
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gate": (("fedemb/gate",), (GATE,)),
    "ledger": (("fedemb/ledger", "fedemb/keys"), (LEDGER, "tests/components/reserve_budget")),
    "privacy": (("fedemb/privacy",), (PRIVACY, PLANTED)),
    "engine": (
        tuple(f"fedemb/embedding/{name}.py" for name in ENGINE),
        (
            f"{EMBEDDING}/test_embedding_rounds.py",
            f"{EMBEDDING}/test_embedding_unit_gradient.py",
            f"{EMBEDDING}/test_embedding_head_gradient.py",
        ),
    ),
    "training": (
        ("fedemb/training", "train_dp_fedemb", "train_dp_sgd"),
        (
            "tests/components/train_dp_fedemb/test_train_run.py",
            "tests/components/train_dp_sgd/test_train_sgd_run.py",
            TRAINING,
        ),
    ),
}
"""Of each group: which code it tries, below `components/`, and which tests may notice."""
WARM = {"gate": "test_good_run_is_allowed_without_reasons"}
"""A test that runs once before any mutant, so that what its session shares is made once."""
ELSEWHERE = ("hosts.py", "secret_manager.py")
"""The same for these files."""
LEFT_OUT = ("kill", "race", "hosts", "year", "speed", "concurrency")
"""Tests that start processes of their own, or take minutes."""
SPENT = 8.0
"""Processor seconds of tests for one mutant, as the first pass measured them."""
LONGEST = 6.0
"""A test that takes more processor seconds is not among the quick ones."""
NOT_PLACED = 71
"""Exit code of a child that found no function to change."""
SLOWER = 8.0
"""A mutant is stopped whose tests take so many times as long: an endless loop, or a busy host."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    operator: str
    occurrence: int
    line: int
    begin: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """Names the change as long as its file stays as it is."""
        digest = hashlib.sha256(_text(self.file).encode()).hexdigest()[:12]
        file = self.file.removeprefix("components/")
        return f"{file}@{digest}:{self.begin}:{self.operator}"

    def source(self) -> str:
        """The file with the change.

        Raises:
          ValueError: the file is not the one that the mutants were listed from.
        """
        text = _text(self.file)
        end = self.begin + len(self.old)
        if text[self.begin : end] != self.old:
            raise ValueError(f"{self.file} changed since the mutants were listed; list them again")
        return text[: self.begin] + self.new + text[end:]


@functools.cache
def _text(file: str) -> str:
    return (REPOSITORY / file).read_text()


class Changed:
    """The function that a mutant changes, found in both versions of its file."""

    def __init__(self, mutant: Mutant):
        """Compiles both versions; where code outside of functions changed, `old` stays None."""
        self.path = str(REPOSITORY / mutant.file)
        before = compile(_text(mutant.file), self.path, "exec", dont_inherit=True)
        after = compile(mutant.source(), self.path, "exec", dont_inherit=True)
        self.old: CodeType | None = None
        self.new: CodeType | None = None
        found = _changed(before, after)
        if found is not None and found[0].co_flags & 0x2:
            self.old, self.new = found

    def functions(self) -> list[FunctionType]:
        """The living functions of the code: methods and wrapped ones too."""
        old = self.old
        return [
            item
            for item in gc.get_objects()
            if isinstance(item, FunctionType)
            and old is not None
            and item.__code__.co_qualname == old.co_qualname
            and os.path.realpath(item.__code__.co_filename) == os.path.realpath(self.path)
            and abs(item.__code__.co_firstlineno - old.co_firstlineno) < 3
            and item.__code__.co_freevars == old.co_freevars
        ]

    def put_in_place(self) -> bool:
        """Replaces the code of the function; False where no living function has it."""
        functions = self.functions()
        for function in functions:
            assert self.new is not None
            function.__code__ = self.new
        return bool(functions)


def _changed(before: CodeType, after: CodeType) -> tuple[CodeType, CodeType] | None:
    """The outermost function whose code differs; the module where more than functions differ."""
    olds = [const for const in before.co_consts if isinstance(const, CodeType)]
    news = [const for const in after.co_consts if isinstance(const, CodeType)]
    same = (
        len(olds) == len(news)
        and before.co_code == after.co_code
        and before.co_names == after.co_names
        and [const for const in before.co_consts if not isinstance(const, CodeType)]
        == [const for const in after.co_consts if not isinstance(const, CodeType)]
    )
    if not same:
        return before, after
    for old, new in zip(olds, news, strict=True):
        if old != new:
            found = _changed(old, new)
            if found is None:
                continue
            # A function inside a function changes with the outer one.
            return (before, after) if before.co_flags & 0x2 else found
    return None


def _outside(mutant: Mutant) -> bool:
    """Whether code outside of functions changes, which takes a copy of the product."""
    try:
        return Changed(mutant).old is None
    except SyntaxError:
        return True


def group_of(file: str) -> str | None:
    """The group that tries a file."""
    below = file.removeprefix("components/")
    for name, (folders, _) in GROUPS.items():
        if below.startswith(folders):
            return name
    return None


def files() -> list[str]:
    """The files that are changed."""
    found = [
        path
        for places, _ in GROUPS.values()
        for place in places
        for path in [REPOSITORY / "components" / place]
    ]
    paths = {item for path in found for item in ([path] if path.is_file() else path.rglob("*.py"))}
    names = sorted(str(path.relative_to(REPOSITORY)) for path in paths)
    return [name for name in names if not any(part in name for part in ELSEWHERE)]


def _digest_of_code(group: str) -> str:
    """Of the product and the tests of a group: while it stays, so does the first pass."""
    digest = hashlib.sha256(json.dumps(GROUPS[group]).encode())
    places = [REPOSITORY / "components", *(REPOSITORY / test for test in GROUPS[group][1])]
    for place in places:
        for path in sorted([place] if place.is_file() else place.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Server:
    """A pytest plugin: in the place of the tests it runs mutants, each in a forked child."""

    def __init__(self, group: str, mutants: list[Mutant], results: Path, until: float):
        self.group, self.mutants, self.results, self.until = group, mutants, results, until
        self.calls: dict[str, list[list[object]]] = {}
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what is not quick."""
        items[:] = [
            item
            for item in items
            if not any(item.iter_markers("slow"))
            and not any(word in item.path.name for word in LEFT_OUT)
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """First pass, a control without a change, then the mutants."""
        self.items = {item.nodeid: item for item in session.items}
        kept = REPOSITORY / "build" / f"mutation-{self.group}.json"
        code = _digest_of_code(self.group)
        if kept.exists() and (first := json.loads(kept.read_text()))["code"] == code:
            self.seconds, self.calls = first["seconds"], first["calls"]
        else:
            self._first_pass()
            self._control()
            kept.parent.mkdir(exist_ok=True)
            first = {"code": code, "seconds": self.seconds, "calls": self.calls}
            kept.write_text(json.dumps(first))
        warm = WARM.get(self.group)
        run_in_order([item for item in session.items if warm and item.name == warm])
        for mutant in self.mutants:
            if time.monotonic() > self.until:
                break
            status, by = self._try(mutant)
            line = {"key": mutant.key, "status": status}
            if status == "caught":
                line["by"] = by
            else:
                line |= {"line": mutant.line, "change": f"{mutant.old} -> {mutant.new}"}
            with self.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return True

    # The first pass

    def _first_pass(self) -> None:
        """Notes of each test the product's functions it calls and its seconds; all must pass."""
        with tempfile.TemporaryDirectory() as folder:
            noted = Path(folder) / "calls"
            child = os.fork()
            if child == 0:
                self._note_calls(noted)
            os.waitpid(child, 0)
            for line in noted.read_text().splitlines():
                name, passed, seconds, calls = json.loads(line)
                if passed and seconds <= LONGEST:
                    self.seconds[name], self.calls[name] = seconds, calls
        failed = self.items.keys() - self.calls.keys()
        said = f"{self.group}: {len(self.calls)} quick tests, {len(failed)} left out\n"
        sys.stdout.write(said)
        sys.stdout.flush()

    def _note_calls(self, noted: Path) -> None:
        components = str(REPOSITORY / "components")
        with noted.open("w") as file:
            items = list(self.items.values())
            for item, following in zip(items, [*items[1:], None], strict=True):
                seen: set[tuple[str, int]] = set()

                def profile(frame, event, _arg, seen=seen):
                    if event == "call" and frame.f_code.co_filename.startswith(components):
                        seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

                started = time.process_time()  # not the clock: other work slows it down
                sys.setprofile(profile)
                passed = run_in_order([item], following) is None
                sys.setprofile(None)
                calls = [[os.path.realpath(name), line] for name, line in seen]
                took = time.process_time() - started
                file.write(json.dumps([item.nodeid, passed, took, calls]) + "\n")
                file.flush()
        os._exit(0)

    def _nearest(self, path: str, first: int | None) -> list[str]:
        """The quick tests that call a function of a file, quickest first; None: any function."""
        real = os.path.realpath(path)
        calling = [
            name
            for name, calls in self.calls.items()
            if any(
                file == real and (first is None or abs(line - first) < 3) for file, line in calls
            )
        ]
        chosen, spent = [], 0.0
        for name in sorted(calling, key=lambda name: self.seconds[name]):
            spent += self.seconds[name]
            if chosen and spent > SPENT:
                break
            chosen.append(name)
        # Tests of one module side by side: what they share is made once.
        modules = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
        return sorted(chosen, key=lambda name: modules.index(name.partition("::")[0]))

    def _control(self) -> None:
        """Without a change the tests of each file must pass, in the order of mutants.

        Raises:
          RuntimeError: they do not, so a mutant would be counted as caught for no reason.
        """
        for file in sorted({mutant.file for mutant in self.mutants}):
            tests = self._nearest(str(REPOSITORY / file), None)
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log"
                code = _in_child(lambda tests=tests, log=log: self._run(tests, log), 300)
                if code != 0:
                    said = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"tests of {file} fail without a change: {said}")

    # One mutant

    def _try(self, mutant: Mutant) -> tuple[str, str | None]:
        """`caught`, `survived`, `not_reached` or `stopped`, and the test that caught it."""
        try:
            changed = Changed(mutant)
        except SyntaxError:
            return "not_code", None
        inside = changed.old is not None and bool(changed.functions())
        first = changed.old.co_firstlineno if changed.old else None
        tests = self._nearest(changed.path, first)
        if not tests:
            return "not_reached", None
        limit = 20 + SLOWER * sum(self.seconds[name] for name in tests)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            code: int | None = NOT_PLACED
            if inside:
                code = _in_child(lambda: self._run(tests, log, changed), limit)
            if code == NOT_PLACED:
                copy = Path(folder)
                code = _in_child(lambda: _run_on_a_copy(mutant, tests, copy, log), limit + 60)
            text = log.read_text(errors="replace") if log.exists() else ""
        if code is None:
            return "stopped", None
        if code == 0:
            return "survived", None
        failed = re.search(r"^FAILED (\S+)", text, re.MULTILINE)
        return "caught", failed[1].rsplit("::", 1)[-1] if failed else f"exit {code}"

    def _run(self, tests: list[str], log: Path, changed: Changed | None = None) -> None:
        """Never returns: the exit code says whether all tests passed, with the change if given."""
        code = 70
        try:
            output = os.open(log, os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = NOT_PLACED
            if changed is None or changed.put_in_place():
                code = 70
                failed = run_in_order([self.items[name] for name in tests])
                code = 0 if failed is None else 1
                os.write(1, f"\nFAILED {failed}\n".encode())
        finally:
            os._exit(code)


class _Last:
    """Stands for a next test that shares the session and nothing else."""

    def __init__(self, item: pytest.Item):
        self._item = item

    def listchain(self) -> list[object]:
        """The session of the test."""
        return list(self._item.listchain()[:1])


class _Reports:
    """A pytest plugin that keeps the reports of a test."""

    def __init__(self):
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a failure in set-up, call or tear-down."""
        self.failed |= report.failed


def run_in_order(items: list[pytest.Item], then: pytest.Item | None = None) -> str | None:
    """Runs tests in this process, before another if given.

    Returns:
      The first that fails; None where all pass.
    """
    for item, following in zip(items, [*items[1:], then], strict=True):
        reports = _Reports()
        item.config.pluginmanager.register(reports)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following or _Last(item))
        item.config.pluginmanager.unregister(reports)
        if reports.failed:
            return item.nodeid
    return None


def _run_on_a_copy(mutant: Mutant, tests: list[str], folder: Path, log: Path) -> None:
    """Never returns: runs pytest anew, with the whole product in a changed copy."""
    copy = folder / "copy"
    for tree in ("components", "pipelines", "requirements"):
        shutil.copytree(REPOSITORY / tree, copy / tree, symlinks=True)
    (copy / mutant.file).write_text(mutant.source())
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'components'}:{REPOSITORY}"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    os.execve(sys.executable, command, environment)


def _in_child(act: Callable[[], None], seconds: float) -> int | None:
    """Runs what never returns in a forked child; see `_waited`."""
    child = os.fork()
    if child == 0:
        os.setsid()
        act()
        os._exit(70)
    return _waited(child, seconds)


def _waited(child: int, seconds: float) -> int | None:
    """The exit code of a child; None where it was stopped for taking too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def tried(results: Path) -> Iterator[dict[str, object]]:
    """What became of the mutants so far."""
    if results.exists():
        yield from map(json.loads, results.read_text().splitlines())


def summary(results: Path) -> str:
    """How many mutants of each group were tried, by what became of them, as a Markdown table."""
    statuses = ("caught", "survived", "not_reached", "stopped", "not_code")
    counts = Counter(
        (str(group_of(f"components/{line['key']}")), str(line["status"])) for line in tried(results)
    )
    rows = [
        [group, sum(counts[group, status] for status in statuses)]
        + [counts[group, status] for status in statuses]
        for group in GROUPS
    ]
    rows.append(["all", *(sum(int(row[column]) for row in rows) for column in range(1, 7))])
    head = "| group | tried | " + " | ".join(statuses) + " |\n|---"
    lines = [" | ".join(map(str, row)) for row in rows]
    return head + "|---" * 6 + "|\n" + "".join(f"| {line} |\n" for line in lines)


def main() -> None:
    """Tries what was not tried yet, group after group, and prints a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mutants", type=Path, nargs="?", help="Mutants as listed by mutants.py.")
    parser.add_argument("--files", action="store_true", help="Print the files that are changed.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Time limit, 60 by default.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="File that is added to.")
    parser.add_argument("--group", choices=GROUPS, help="Only the mutants of one group.")
    parser.add_argument("--most", type=int, default=None, help="Mutants of each group at most.")
    parser.add_argument("--survivors", action="store_true", help="Print what no test noticed.")
    asked = parser.parse_args()
    if asked.survivors:
        alive = [line for line in tried(asked.results) if line["status"] == "survived"]
        sys.stdout.write("".join(f"{json.dumps(line)}\n" for line in alive))
        return
    if asked.files or asked.mutants is None:
        sys.stdout.write("\n".join(files()) + "\n")
        return
    os.chdir(REPOSITORY)
    until = time.monotonic() + 60 * asked.minutes
    done = {str(line["key"]) for line in tried(asked.results)}
    waiting: dict[str, list[Mutant]] = {group: [] for group in GROUPS}
    for line in asked.mutants.read_text().splitlines():
        mutant = Mutant(**json.loads(line))
        group = group_of(mutant.file)
        if group and asked.group in (None, group) and mutant.key not in done:
            waiting[group].append(mutant)
    for group, mutants in waiting.items():
        if not mutants:
            continue
        # In an order of its own, so that a run that is stopped tried a sample of all files.
        mutants.sort(
            key=lambda mutant: (_outside(mutant), hashlib.sha256(mutant.key.encode()).digest())
        )
        child = os.fork()
        if child == 0:
            server = Server(group, mutants[: asked.most], asked.results, until)
            tests = [test for test in GROUPS[group][1] if (REPOSITORY / test).exists()]
            options = ["-q", "-s", "-p", "no:cacheprovider", "--no-header"]
            os._exit(int(pytest.main([*options, *tests], plugins=[server])))
        os.waitpid(child, 0)
    sys.stdout.write(summary(asked.results))


if __name__ == "__main__":
    main()
