"""A pytest plugin that runs mutants instead of tests.

A first pass notes which functions of the product each test calls, and its processor seconds. Each
mutant is then tried in a forked child: the code of the changed function is replaced in place, and
the tests that call it run, the quickest first, until one fails.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import FrameType, FunctionType

import pytest

from tests.mutation.changes import Changed, Mutant
from tests.mutation.children import in_child, quiet
from tests.mutation.fresh import Fresh
from tests.mutation.groups import GROUPS, LEFT_OUT, REPOSITORY, WARM

LONGEST = 4.0
"""A test that takes more processor seconds is not among the quick ones."""
STOPPED = 5.0
"""The first pass stops a test after so many processor seconds, without its fixtures."""
NOT_PLACED = 71
"""Exit code of a child that found no function to change."""
SLOWER = 6.0
"""A mutant is stopped whose tests take so many times as long: an endless loop."""
PYTEST_FAILED = 1
CONTROL = 300.0
"""Processor seconds for the tests of one mutant without a change."""


class Server:
    """Runs a first pass, then the mutants of a group."""

    def __init__(
        self,
        group: str,
        mutants: list[Mutant],
        results: Path,
        *,
        until: float,
        fresh: Fresh,
        spent: float,
    ):
        self.group, self.mutants, self.results, self.until = group, mutants, results, until
        self.fresh, self.spent = fresh, spent
        self.calls: dict[str, list[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}
        self.sound: set[str] = set()
        """Tests that passed without a change when a mutant had made them fail."""

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
        """Runs the mutants until time is up."""
        self.items = {item.nodeid: item for item in session.items}
        self._learn()
        quickest = min(self.seconds, key=lambda name: self.seconds[name])
        for item in session.items:  # what a session shares is made once, and not in each child
            if item.nodeid == quickest or item.name == WARM.get(self.group):
                run_in_order([item])
        self.functions = _functions()
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

    def _learn(self) -> None:
        kept = REPOSITORY / "build" / f"mutation-{self.group}.json"
        code = _digest_of_code(self.group)
        if kept.exists() and (first := json.loads(kept.read_text()))["code"] == code:
            self.seconds = first["seconds"]
            self.calls = {
                name: [(file, line) for file, line in calls]
                for name, calls in first["calls"].items()
            }
            return
        self._first_pass()
        kept.parent.mkdir(exist_ok=True)
        first = {"code": code, "seconds": self.seconds, "calls": self.calls}
        kept.write_text(json.dumps(first))

    def _first_pass(self) -> None:
        """Notes of each test the product's functions it calls and its seconds."""
        with tempfile.TemporaryDirectory() as folder:
            noted = Path(folder) / "calls"
            child = os.fork()
            if child == 0:
                self._note_calls(noted)
            os.waitpid(child, 0)
            for line in noted.read_text().splitlines():
                name, passed, seconds, calls = json.loads(line)
                if passed and seconds <= LONGEST:
                    self.seconds[name] = seconds
                    self.calls[name] = [(file, number) for file, number in calls]
        left_out = self.items.keys() - self.calls.keys()
        sys.stdout.write(f"{self.group}: {len(self.calls)} quick tests, {len(left_out)} left out\n")
        sys.stdout.flush()

    def _note_calls(self, noted: Path) -> None:
        components = str(REPOSITORY / "components")
        next(iter(self.items.values())).config.pluginmanager.register(_StopsLong())
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
        """The quick tests that call a function of a file, nearest first; None: any function.

        A test is near that is quick and calls few functions.
        """
        real = os.path.realpath(path)
        calling = [
            name
            for name, calls in self.calls.items()
            if any(
                file == real and (first is None or abs(line - first) < 3) for file, line in calls
            )
        ]
        chosen, spent = [], 0.0
        for name in sorted(calling, key=lambda name: self.seconds[name] * len(self.calls[name])):
            spent += self.seconds[name]
            if chosen and spent > self.spent:
                break
            chosen.append(name)
        # Tests of one module side by side: what they share is made once.
        modules = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
        return sorted(chosen, key=lambda name: modules.index(name.partition("::")[0]))

    def _passes_unchanged(self, tests: list[str]) -> bool:
        """Whether tests pass without a change, in the order in which a mutant ran them."""
        if tests[-1] in self.sound:
            return True
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            code = in_child(lambda: self._run(tests, log), CONTROL)
        if code == 0:
            self.sound.update(tests)
        return code == 0

    # One mutant

    def _try(self, mutant: Mutant) -> tuple[str, str | None]:
        """`caught`, `survived`, `not_reached` or `stopped`, and the test that caught it."""
        try:
            changed = Changed(mutant)
        except SyntaxError:
            return "not_code", None
        first = changed.old.co_firstlineno if changed.old else None
        tests = self._nearest(changed.path, first)
        if not tests:
            return "not_reached", None
        limit = 10 + SLOWER * sum(self.seconds[name] for name in tests)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            code: int | None = NOT_PLACED
            if changed.living(self.functions):
                code = in_child(lambda: self._run(tests, log, changed), limit)
            if code == NOT_PLACED:
                code = self.fresh.run(mutant, tests, str(log), limit + 60)
            text = log.read_text(errors="replace") if log.exists() else ""
        if code is None:
            return "stopped", None
        if code == 0:
            return "survived", None
        failed = _failed(text)
        if failed in tests and not self._passes_unchanged(tests[: tests.index(failed) + 1]):
            sys.stdout.write(f"{failed} fails without a change and is left out\n")
            del self.calls[failed], self.seconds[failed]
            return self._try(mutant)
        return "caught", failed.rsplit("::", 1)[-1] if failed else f"exit {code}"

    def _run(self, tests: list[str], log: Path, changed: Changed | None = None) -> None:
        """Never returns: the exit code says whether all tests passed, with the change if given."""
        code = 70
        try:
            quiet(log)
            code = NOT_PLACED
            if changed is None or changed.put_in_place(self.functions):
                code = 70
                items = [self.items[name] for name in tests]
                if items:
                    _own_folders(items[0].config)
                failed = run_in_order(items)
                code = 0 if failed is None else PYTEST_FAILED
                os.write(1, f"\nFAILED {failed}\n".encode())
        finally:
            os._exit(code)


def _failed(text: str) -> str | None:
    """The first test that failed, from the output of a child."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - .*)?$", text, re.MULTILINE)
    return found[1] if found else None


def _digest_of_code(group: str) -> str:
    """Of the product and the tests of a group: while it stays, so does the first pass."""
    digest = hashlib.sha256(json.dumps(GROUPS[group]).encode())
    places = [REPOSITORY / "components", *(REPOSITORY / "tests" / it for it in GROUPS[group].tests)]
    for place in places:
        for path in sorted([place] if place.is_file() else place.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _functions() -> dict[tuple[str, str], list[FunctionType]]:
    """The living functions of the product, by file and qualified name."""
    components, found = str(REPOSITORY / "components"), defaultdict[tuple[str, str], list](list)
    for item in gc.get_objects():
        if isinstance(item, FunctionType) and item.__code__.co_filename.startswith(components):
            code = item.__code__
            found[os.path.realpath(code.co_filename), code.co_qualname].append(item)
    return dict(found)


def _own_folders(config: pytest.Config) -> None:
    """Temporary files of tests go to the folder of this child, which its parent removes."""
    factory = config._tmp_path_factory  # pyright: ignore
    factory._given_basetemp = factory._basetemp = None


class _StopsLong:
    """A pytest plugin that stops tests that are not quick."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Raises TimeoutError in a test after `STOPPED` processor seconds."""

        def stop(_signal: int, _frame: FrameType | None) -> None:
            raise TimeoutError("this test is not quick")

        signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, STOPPED)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


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
