"""Tries the changes of Cosmic Ray, stores the result of each, and resumes after the last run.

    python -m tests.mutation.run MUTANTS.jsonl [--minutes 60] [--results FILE]

Mutants of all groups are tried in one random order with a fixed seed: a run that is stopped tried a
sample of all files. For a pass that notes which tests call which functions, this module is also a
plugin of pytest.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

from tests.planted_bugs.runner import RED, REPOSITORY, load, tried

RESULTS = Path(__file__).with_name("results.jsonl")
SEED = b"a sample of all files"
SPENT = 2.5
"""Processor seconds of tests for one mutant, as the first pass measured them."""
SLOWER = 6.0
"""A mutant is stopped whose tests take so many times as long: an endless loop."""
STATUSES = ("caught", "survived", "not_reached", "stopped", "not_code")
LEFT_OUT = ("kill", "race", "hosts", "year", "speed", "concurrency")
"""Names of test files that start processes of their own, or take minutes."""
ELSEWHERE = ("fedemb/training/jax_", "hosts.py", "secret_manager.py")
"""Code whose tests run it in processes of their own, which the first pass does not see."""

_GATE = ("decide", "rule", "model_rules", "privacy_rules")
_LEDGER = ("components/ledger", "components/reserve_budget", "components/private_inputs")
_ROUNDS = (
    "rounds",
    "unit_gradient",
    "covariance_projection",
    "server",
    "feature_cache",
    "backbones",
)
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gate": (tuple(f"fedemb/release/{it}.py" for it in _GATE), ("components/gate",)),
    "release": (("fedemb/release",), ("components/release", "components/gate")),
    "ledger": (("fedemb/ledger",), (*_LEDGER, "components/gate/test_gate_approvals.py")),
    "keys": (
        ("fedemb/keys",),
        (
            *_LEDGER,
            "components/gate/test_gate_approvals.py",
            "components/release/test_release_model.py",
            "components/training/test_round_records.py",
            "components/partition_users/test_partition_properties.py",
        ),
    ),
    "privacy": (
        ("fedemb/privacy",),
        (
            *("components/privacy", "planted_bugs/test_layers.py"),
            "components/embedding/test_embedding_unit_gradient.py",
            "components/embedding/test_embedding_covariance_projection.py",
        ),
    ),
    "training": (
        ("fedemb/training", "fedemb/steps/train_model.py"),
        (
            *(f"components/embedding/test_embedding_{name}.py" for name in _ROUNDS),
            *("components/privacy/test_attack_rates.py", "statistical/test_independence.py"),
            *("components/train_model/test_train_run.py", "components/training"),
            "components/simulation",
        ),
    ),
}
"""Code below `components/` that is changed, and tests below `tests/` that may notice."""


def files() -> list[str]:
    """The files that are changed, relative to the repository."""
    roots = [REPOSITORY / "components" / place for code, _ in GROUPS.values() for place in code]
    paths = {it for root in roots for it in (root.rglob("*.py") if root.is_dir() else [root])}
    names = sorted(str(path.relative_to(REPOSITORY)) for path in paths)
    return [name for name in names if not any(part in name for part in ELSEWHERE)]


def _group_of(file: str) -> str | None:
    below = file.removeprefix("components/")
    return next((name for name, (code, _) in GROUPS.items() if below.startswith(code)), None)


# The first pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes the product's functions that a test calls, and its processor seconds."""
    components, seen = str(REPOSITORY / "components"), set()

    def note(frame, event, _arg):
        if event == "call" and frame.f_code.co_filename.startswith(components):
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    started, failures = time.process_time(), item.session.testsfailed
    sys.setprofile(note)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        if item.session.testsfailed == failures:
            calls = [[os.path.realpath(file), line] for file, line in seen]
            line = {"test": item.nodeid, "seconds": time.process_time() - started, "calls": calls}
            with Path(os.environ["MUTATION_CALLS"]).open("a") as noted:
                noted.write(json.dumps(line) + "\n")


def _first_pass(group: str) -> list[dict]:
    """Each quick test of a group with its calls; kept while the product and the tests stay."""
    code, tests = (
        sorted(REPOSITORY.joinpath(top).rglob("*.py")) for top in ("components", "tests")
    )
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*code, *tests))).hexdigest()
    kept = REPOSITORY / "build" / f"mutation-{group}-{digest[:12]}.jsonl"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        begun = kept.with_suffix(".begun")
        begun.unlink(missing_ok=True)
        options = ["-q", "-p", "tests.mutation.run", "-p", "no:cacheprovider", "-m", "not slow"]
        options += [f"--ignore-glob=*{word}*" for word in LEFT_OUT]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{it}" for it in GROUPS[group][1])],
            env={**os.environ, "MUTATION_CALLS": str(begun)},
            check=False,
        )
        begun.rename(kept)
    return list(map(json.loads, kept.read_text().splitlines()))


def _nearest(noted: list[dict], file: str, line: int | None, spent: float) -> list[dict]:
    """The tests that call a function of a file, nearest first; None: any function of it.

    A test is near that is quick and calls few functions.
    """
    real = os.path.realpath(REPOSITORY / file)
    calling = [
        test
        for test in noted
        if any(name == real and line in (None, first) for name, first in test["calls"])
    ]
    chosen, seconds = [], 0.0
    for test in sorted(calling, key=lambda test: test["seconds"] * len(test["calls"])):
        seconds += test["seconds"]
        if chosen and seconds > spent:
            break
        chosen.append(test)
    return chosen


def _function_at(source: str, line: int) -> int | None:
    """First line of the outermost function around a line, with its decorators, as code has it."""
    for node in ast.walk(ast.parse(source)):  # breadth first
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= node.end_lineno:
            return min([node.lineno, *(it.lineno for it in node.decorator_list)])
    return None


# One mutant


def _text(file: str) -> str:
    return (REPOSITORY / file).read_text()


def _key(mutant: Mapping) -> str:
    """Names the change as long as its file stays as it is."""
    digest = hashlib.sha256(_text(mutant["file"]).encode()).hexdigest()[:12]
    file = mutant["file"].removeprefix("components/")
    return f"{file}@{digest}:{mutant['begin']}:{mutant['operator']}:{mutant['occurrence']}"


def _try(mutant: Mapping, spent: float, sound: set[str]) -> tuple[str, str | None]:
    """One of `STATUSES`, and the test that caught it."""
    file, text, begin = mutant["file"], _text(mutant["file"]), mutant["begin"]
    source = text[:begin] + mutant["new"] + text[begin + len(mutant["old"]) :]
    try:
        compile(source, file, "exec")
    except SyntaxError:
        return "not_code", None
    noted = _first_pass(str(_group_of(file)))
    tests = _nearest(noted, file, _function_at(text, mutant["line"]), spent)
    if not tests:
        return "not_reached", None
    names = tuple(test["test"] for test in tests)
    found = tried({file: source}, names, 60 + SLOWER * sum(test["seconds"] for test in tests))
    if found.code in (-signal.SIGKILL, -signal.SIGXCPU):
        return "stopped", None
    if found.code == 0:
        return "survived", None
    if found.code == RED and found.caught_by not in sound:
        before = names[: names.index(found.caught_by) + 1] if found.caught_by in names else names
        if tried({}, before).code:
            raise SystemExit(f"{found.caught_by} fails without a change")
        sound.add(str(found.caught_by))
    return "caught", (found.caught_by or f"exit {found.code}").rsplit("::", 1)[-1]


# The record


def _record(results: Path) -> list[dict]:
    """What became of the mutants so far; a later line of a mutant takes the place of an earlier."""
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else []
    return list({line["key"]: line for line in lines}.values())


def summary(results: Path) -> str:
    """How many mutants of each group were tried, by what became of them, as a Markdown table."""
    counts = Counter((_group_of(line["key"]), line["status"]) for line in _record(results))
    head = "| group | tried | " + " | ".join(STATUSES) + " |\n|---" + "|---" * 6 + "|\n"
    rows = [[group, *(counts[group, status] for status in STATUSES)] for group in GROUPS]
    rows.append(["all", *(sum(row[column] for row in rows) for column in range(1, 6))])
    lines = (f"| {name} | {sum(row)} | {' | '.join(map(str, row))} |\n" for name, *row in rows)
    return head + "".join(lines)


def main() -> None:
    """Tries what was not tried yet, and prints a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mutants", type=Path, nargs="?", help="Mutants as listed by mutants.py.")
    parser.add_argument("--files", action="store_true", help="Print the files that are changed.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Time limit, 60 by default.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="File that is added to.")
    parser.add_argument("--spent", type=float, default=SPENT, help="Processor seconds of a mutant.")
    parser.add_argument("--again", action="store_true", help="Try survivors once more.")
    asked = parser.parse_args()
    if asked.files:
        sys.stdout.write("\n".join(files()) + "\n")
    else:
        _try_all(asked)
        sys.stdout.write(summary(asked.results))


def _try_all(asked: argparse.Namespace) -> None:
    status = {line["key"]: line["status"] for line in _record(asked.results)}
    listed = map(json.loads, asked.mutants.read_text().splitlines())
    waiting = {
        _key(mutant): mutant
        for mutant in listed
        if _group_of(mutant["file"])
        and status.get(_key(mutant)) == ("survived" if asked.again else None)
    }
    order = sorted(waiting, key=lambda key: hashlib.sha256(SEED + key.encode()).digest())
    load()
    until, sound = time.monotonic() + 60 * asked.minutes, set[str]()
    for key in order:
        if time.monotonic() > until:
            break
        mutant = waiting[key]
        what, by = _try(mutant, asked.spent, sound)
        line = {"key": key, "status": what}
        change = f"{mutant['old']} -> {mutant['new']}"
        line |= {"by": by} if by else {"line": mutant["line"], "change": change}
        with asked.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
