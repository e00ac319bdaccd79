"""Attacks on a run: forged documents, other names of a release, changed packages."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedemb.foundation.canonical_json import file_digest
from fedemb.pipelines.cluster.package import check_package
from tests.adversary.attacks.kind import Attack, Kind, World, attempted
from tests.adversary.forgers import path_of
from tests.kit.pipeline_runs.honest_run import spelled

PACKAGE = Path(__file__).parents[2] / "golden/pipeline_cpu.yaml"
DOCUMENTS = ("plan", "reservation", "users", "card", "audit", "utility", "report")
VALUES: tuple[object, ...] = (None, 0, -1, 1e9, True, "", "x" * 70, [], {}, "0" * 64)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _leaves(value[name], (*path, name))
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from _leaves(value[number], (*path, number))
    else:
        yield path


def _document(world: World, draw: random.Random) -> Attack:
    name = draw.choice(DOCUMENTS)
    place, value = draw.randrange(10**6), draw.choice(VALUES)
    step = draw.choice(["do_gate", "do_gate", "do_release"])

    def act() -> str:
        with world.run() as run:
            path = path_of(run, name)
            fields = json.loads(path.read_text())
            leaves = [leaf for leaf in _leaves(fields) if leaf[0] != "signature"]
            leaf = leaves[place % len(leaves)]
            inner = fields
            for part in leaf[:-1]:
                inner = inner[part]
            inner[leaf[-1]] = value if value != inner[leaf[-1]] else [value]
            path.write_bytes(spelled(fields))
            found = attempted(getattr(run, step))
            return f"{found} ({'.'.join(map(str, leaf))})" if found else ""

    return Attack(f"{name}, leaf {place} is {value!r}, {step}", act)


def _name(world: World, draw: random.Random) -> Attack:
    field = draw.choice(["release.name", "release.version"])
    words = ("2", "1.0.1", "1.00", "faces", "glyphs2", "glyphs-1.0", "latest")
    value = draw.choice(words) + draw.choice(["", "b", "-rc1", ".0"])

    def act() -> str:
        with world.run() as run:
            run.config = run.config.updated({field: value})
            return attempted(run.do_release)

    return Attack(f"{field}={value}", act)


def _package(world: World, draw: random.Random) -> Attack:
    """Code of a step is changed; the package stays a compiled pipeline that keeps the rules."""
    line, digit = draw.randrange(10**6), draw.randrange(1, 10)
    way = draw.choice(["comment", "number", "blank"])

    def act() -> str:
        lines = PACKAGE.read_text().splitlines()
        if way == "number":
            numbered = [at for at, text in enumerate(lines) if re.search(r"cpu.*[0-9]", text)]
            at = numbered[line % len(numbered)]
            lines[at] = re.sub(r"[0-9](?!.*[0-9])", str(digit), lines[at])
            lines += [""] * (lines == PACKAGE.read_text().splitlines())
        else:
            lines.append(f"# {line}" if way == "comment" else "\n" * digit)
        changed = world.fresh() / "package.yaml"
        changed.write_text("\n".join(lines) + "\n")
        return attempted(lambda: check_package(changed, file_digest(PACKAGE)))

    return Attack(f"{way}, line {line}, {digit}", act)


KINDS = (
    Kind("changed documents", _document, 40),
    Kind("released under another name", _name, 10),
    Kind("changed packages", _package, 20),
)
