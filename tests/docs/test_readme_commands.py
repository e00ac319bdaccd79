"""README's two commands are all that a newcomer needs, and CI runs exactly those."""

import re
import subprocess

from tests.docs.test_docs import ROOT

README = (ROOT / "README.md").read_text()


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
