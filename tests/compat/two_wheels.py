"""Lets the wheel of an older commit and that of this tree read the documents of each other.

    python -m tests.compat.two_wheels [REF]

REF is `HEAD~100` by default. Each wheel is built and installed alone; other packages are those of
this environment. Each writes the documents of a run up to its release, and reads those of the
other, each kind by itself, the whole ledger, and the bundle by `fedemb verify`. The newer wheel
reads everything. The older one reads every document of a version it knows, and refuses a later
version with a sentence.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.compat.read_documents import CRASHED, READ, REFUSED

REPOSITORY = Path(__file__).parents[2]
OLDER = "HEAD~100"
HERE = Path(__file__).parent
BUNDLE = "bundle by fedemb verify"


@dataclass(frozen=True)
class Side:
    """A wheel, its sources, and the documents that it wrote."""

    name: str
    tree: Path
    installed: Path
    made: Path

    def run(self, *command: str | Path, tree: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs Python with this wheel, far from any checkout; with its tests if asked."""
        path = [str(self.installed), *([str(self.tree)] if tree else [])]
        return subprocess.run(
            [sys.executable, "-P", *map(str, command)],
            cwd=self.made,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            check=False,
        )


def build(name: str, tree: Path, folder: Path) -> Side:
    """Builds and installs the wheel of a tree, and writes its documents."""
    side = Side(name, tree, folder / f"{name}-installed", folder / f"{name}-documents")
    side.made.mkdir(parents=True)
    uv = Path(sys.executable).with_name("uv")
    wheels = folder / f"{name}-wheel"
    options = ["--no-build-isolation", "--python", sys.executable]
    _done([uv, "build", "--quiet", "--wheel", *options, "--out-dir", wheels], tree)
    (wheel,) = wheels.glob("*.whl")
    target = ["--target", side.installed, "--python", sys.executable]
    _done([uv, "pip", "install", "--quiet", "--no-deps", *target, wheel], folder)
    done = side.run(HERE / "make_documents.py", side.made, tree=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return side


def _done(command: list[str | Path], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def read(reader: Side, writer: Side) -> dict[str, dict[str, str]]:
    """Returns how a wheel reads the documents of another, by kind."""
    done = reader.run(HERE / "read_documents.py", writer.made)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["package"]).is_relative_to(reader.installed), answer["package"]
    trust = writer.made / "run" / "policy" / "ledger" / "trust.json"
    bundle = next((writer.made / "run" / "releases").glob("*/*/manifest.json")).parent
    words = ("verify", bundle, "--trust", trust, "--skip-saved-model")
    done = reader.run("-m", "fedemb", *words)
    text = (done.stderr or done.stdout).strip()
    outcome = REFUSED if done.returncode else READ
    if "Traceback" in text or "this is a bug" in text:
        outcome = CRASHED
    message = text.splitlines()[-1] if done.returncode and text else ""
    found = {"schema": "-", "outcome": outcome, "message": message}
    return {**answer["found"], BUNDLE: found}


def newest(side: Side) -> dict[str, int]:
    """Newest version of each kind that a wheel reads."""
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import json, read_documents as r; "
        "print(json.dumps({k: c.newest for k, c in r.classes().items()}))"
    )
    done = side.run("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(reference: str, folder: Path) -> list[tuple[str, str, str]]:
    """Prints a table, and returns reader, kind and message of each reading that must not be so."""
    tree = folder / "older"
    tree.mkdir()
    archive = subprocess.run(
        ["git", "archive", "--format=tar", reference],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
    older, newer = build("older", tree, folder), build("newer", REPOSITORY, folder)
    known = newest(older)
    wrong: list[tuple[str, str, str]] = []
    print("reader | kind | schema | outcome | message")
    for reader, writer in ((newer, older), (older, newer)):
        for kind, item in sorted(read(reader, writer).items()):
            outcome, message = item["outcome"], item["message"]
            print(" | ".join((reader.name, kind, item["schema"], outcome, message)))
            version = item["schema"].rpartition("/")[2]
            later = reader is older and version.isdecimal() and int(version) > known[kind]
            whole = reader is older and version == "-"
            clear = (
                outcome == REFUSED and f"expected fedemb/{kind}/1 to {known.get(kind)}" in message
            )
            good = clear if later else outcome == READ or (whole and outcome == REFUSED)
            if not good:
                wrong.append((reader.name, kind, message))
    return wrong


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrong = compare(sys.argv[1] if len(sys.argv) > 1 else OLDER, Path(folder))
    for row in wrong:
        print("WRONG:", " | ".join(row))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
