"""Commands of the base run without the packages of the extras, and others name the extra."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from fedemb.foundation import environment
from tests.conftest import REPOSITORY
from tests.kit.pipeline_runs import honest_run

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
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


def name_of(requirement):
    """Normalised name of a distribution in a requirement."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def closure(requirements, extra=""):
    """Names of the distributions that requirements install, with all of theirs."""
    found, todo = set(), list(requirements)
    while todo:
        requirement = todo.pop()
        name = name_of(requirement)
        wanted = set(re.findall(r"[\w-]+", (re.match(r"[\w.-]+\[(.*?)\]", requirement) or " ")[0]))
        if name == "fedemb":
            groups = re.match(r"fedemb\[(.*?)\]", requirement)[1].split(",")
            todo += [item for group in groups for item in PROJECT["optional-dependencies"][group]]
            continue
        if (name, *sorted(wanted)) in found:
            continue
        found.add((name, *sorted(wanted)))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [
            need
            for need in needs
            if "extra ==" not in need
            or any(f'extra == "{extra}"' in need.replace("'", '"') for extra in wanted)
        ]
    return {name for name, *_ in found}


def run_commands(commands):
    """Runs commands in one process in which no module of an extra can be imported."""
    script = WITHOUT_EXTRAS.replace("$absent", repr(sorted(environment._OWNERS)))
    script = script.replace("$commands", repr(commands))
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A released run, and a copy of its ledger."""
    return honest_run.start(tmp_path_factory.mktemp("released") / "run").until_release()


@pytest.mark.long
def test_base_commands_run_without_any_extra(released, tmp_path):
    ledger = ["--ledger", released.ledger_uri]
    trust = ["--trust", f"{released.ledger_uri}/trust.json"]
    bundle = str(released.root / "releases" / "glyphs" / "1.0")
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
    assert "saved_model: only signature and digest checked" in done.stdout


def test_other_commands_name_the_extra_and_end_with_code_2(released, tmp_path):
    trust = ["--trust", f"{released.ledger_uri}/trust.json"]
    bundle = str(released.root / "releases" / "glyphs" / "1.0")
    (tmp_path / "photos.parquet").write_bytes(b"PAR1")
    commands = {
        'fedemb[beam,kfp,train]"': ["run"],
        'fedemb[kfp]"': [
            *("compile", "--output", str(tmp_path / "pipeline.yaml")),
            *(f"--image={name}=image@sha256:{'0' * 64}" for name in ("light", "cpu")),
            f"--image=trainer=image@sha256:{'0' * 64}",
        ],
        'fedemb[train]", or pass --skip-saved-model': ["verify", bundle, *trust],
        'fedemb[stores]"': ["ledger", "show", "--ledger", "gs://bucket/ledger"],
    }
    done = run_commands([(words, 2) for words in commands.values()])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = done.stderr.split("==")[1:]
    for expected, words, text in zip(commands, commands.values(), told, strict=True):
        assert text.strip().startswith(" ".join(words))
        assert f': pip install "{expected}' in text
        assert len(text.strip().splitlines()) == 2, text


def test_verification_with_a_changed_saved_model_fails_without_tensorflow(released, tmp_path):
    bundle = tmp_path / "1.0"
    shutil.copytree(released.root / "releases" / "glyphs" / "1.0", bundle)
    graph = bundle / "saved_model" / "saved_model.pb"
    graph.write_bytes(graph.read_bytes() + b"\0")
    trust = ["--trust", f"{released.ledger_uri}/trust.json"]
    done = run_commands([(["verify", str(bundle), *trust, "--skip-saved-model"], 3)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("extra", "modules"), environment._EXTRAS.items())
def test_every_extra_brings_the_modules_it_is_named_for(extra, modules):
    owners = metadata.packages_distributions()
    brought = closure(PROJECT["optional-dependencies"][extra])
    for module in modules:
        tops = owners.get(module.partition(".")[0], [])
        if module.startswith("google."):
            tops = [module.replace(".", "-")]
            if module == "google.cloud":
                tops = ["google-cloud-storage"]
        assert {name_of(top) for top in tops} & brought, f"{module} is not in {extra}"


def test_base_brings_nothing_of_an_extra():
    base = closure(PROJECT["dependencies"])
    assert len(base) <= 60
    assert not base & {
        *("tensorflow", "keras", "apache-beam", "tfx-bsl", "kfp", "jax", "pyarrow", "pillow"),
        *("matplotlib", "google-cloud-storage", "s3fs"),
    }
