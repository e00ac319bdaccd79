"""README's two commands are all that a newcomer needs, and CI runs exactly those."""

import re
import subprocess

from tests.docs.test_docs import ROOT

README = (ROOT / "README.md").read_text()
IGNORED = {
    r"\.venv.*/": "environments, each made by its own target",
    r"__pycache__/|\*\.pyc|.*_cache/|\.hypothesis/|\*\.egg-info/": "caches",
    r"runs/": "runs of the person who works here",
    r"build/|dist/": "outputs",
}
"""Patterns of ignored paths, and why no test and no other target reads them."""


def command(name: str) -> str:
    """Returns the commands in the block of README with this name, as .ci/run reads them."""
    script = f"/<!-- commands: {name} -->/,/^$/s/^    //p"
    done = subprocess.run(
        ["sed", "-n", script, ROOT / "README.md"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_readme_has_the_two_commands_in_order_and_says_how_long_they_take():
    assert [command(name) for name in ("run", "test")] == ["make run", "make test"]
    assert re.findall(r"<!-- commands: (\w+) -->", README) == ["clone", "run", "test"]
    for name in ("run", "test"):
        assert re.search(rf"`make {name}`[^\n]* minutes", README)


def test_ci_runs_the_commands_of_readme_before_anything_else_in_a_clean_clone():
    script = (ROOT / ".ci" / "run").read_text()
    makes = re.findall(r"^make .*", script, re.MULTILINE)
    assert makes == ["make test-long"]
    loop = script.index("for name in run test")
    assert script.index("git clone") < loop < script.index(makes[0])
    assert "<!-- commands: $name -->" in script


def test_ignored_files_are_environments_caches_and_outputs():
    """A record that one target leaves behind and another needs would be a new kind of entry."""
    for line in (ROOT / ".gitignore").read_text().splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in IGNORED), line


def test_no_target_reads_what_another_target_leaves_behind():
    """Paths in ignored folders are named by one target only, `clean` aside."""
    makefile = (ROOT / "Makefile").read_text()
    named: dict[str, set[str]] = {}
    target = ""
    for line in makefile.splitlines():
        if (start := re.match(r"([a-z-]+):", line)) is not None:
            target = start[1]
        if line.startswith("\t") and target != "clean":
            for path in re.findall(r"\b(?:build|dist|runs)/[\w./-]+", line):
                named.setdefault(path, set()).add(target)
    assert {path: targets for path, targets in named.items() if len(targets) > 1} == {}
