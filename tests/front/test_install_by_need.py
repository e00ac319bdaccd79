"""Commands of the base run without the packages of the extras, and others name the extra."""

import subprocess
import sys
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WITHOUT_EXTRAS = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if any(name == module or name.startswith(f"{module}.") for module in ABSENT):
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

ABSENT = $absent
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from fedemb.pipelines.cli.main import main
failed = []
for words, expected in $commands:
    print("==", *words, flush=True)
    print("==", *words, flush=True, file=sys.stderr)
    try:
        main(words)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    if code != expected:
        failed.append((words, code))
sys.exit(f"failed: {failed}" if failed else 0)
"""


def _absent_modules():
    """Modules of all packages here that a base installation does not have."""
    base, waiting = set(), [Requirement("fedemb")]
    while waiting:
        needed = waiting.pop()
        if (name := canonicalize_name(needed.name)) not in base:
            base.add(name)
            for other in map(Requirement, requires(name) or ()):
                marks = [{"extra": extra} for extra in (needed.extras or {""})]
                if other.marker is None or any(map(other.marker.evaluate, marks)):
                    waiting.append(other)
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not base & set(map(canonicalize_name, owners))
    )


def run_commands(commands):
    """Runs commands in one process in which no module beyond the base can be imported."""
    script = WITHOUT_EXTRAS.replace("$absent", repr(_absent_modules()))
    script = script.replace("$commands", repr(commands))
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_base_commands_run_without_any_extra(released_run, tmp_path):
    ledger = ["--ledger", released_run.ledger_uri]
    trust = ["--trust", f"{released_run.ledger_uri}/trust.json"]
    bundle = str(released_run.root / "releases" / "glyphs" / "1.0")
    init = ["--ledger", str(tmp_path / "ledger"), "--keys", str(tmp_path / "keys")]
    commands = [
        (["--help"], 0),
        (["--version"], 0),
        (["config"], 0),
        (["config", "--json"], 0),
        (["config", "mechanism"], 0),
        (["plan", "--config", "quickstart"], 0),
        (["backbone", "show"], 0),
        (["ledger", "init", "--config", "quickstart", *init], 0),
        (["ledger", "show", *ledger], 0),
        (["ledger", "verify", *ledger], 0),
        (["ledger", "show", *ledger], 0),
        (["verify", bundle, *trust, "--skip-saved-model"], 0),
        (["verify", bundle, *trust, *ledger, "--skip-saved-model", "--json"], 0),
        (["runs", str(tmp_path)], 2),
        (["approve", "--help"], 0),
        (["doctor", "--help"], 0),
    ]
    done = run_commands(commands)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "pip install" not in done.stderr
    assert "verified: glyphs 1.0" in done.stdout
    assert "saved_model and pages: only digests checked" in done.stdout


def test_commands_without_their_extra_name_it_and_exit_with_code_2(released_run, tmp_path):
    trust = ["--trust", f"{released_run.ledger_uri}/trust.json"]
    bundle = str(released_run.root / "releases" / "glyphs" / "1.0")
    (tmp_path / "photos.parquet").write_bytes(b"PAR1")
    commands = {
        'fedemb[beam,kfp,train]"': ["run"],
        'fedemb[kfp]"': [
            *("compile", "--output", str(tmp_path / "pipeline.yaml")),
            *(f"--image={name}=image@sha256:{'0' * 64}" for name in ("light", "cpu")),
            f"--image=trainer=image@sha256:{'0' * 64}",
        ],
        'fedemb[kfp,train]", or pass --skip-saved-model': ["verify", bundle, *trust],
        'fedemb[stores]"': ["ledger", "show", "--ledger", "gs://bucket/ledger"],
    }
    done = run_commands([(words, 2) for words in commands.values()])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = done.stderr.split("==")[1:]
    for expected, words, text in zip(commands, commands.values(), told, strict=True):
        assert text.strip().startswith(" ".join(words))
        assert f': pip install "{expected}' in text
        assert len(text.strip().splitlines()) == 2, text
