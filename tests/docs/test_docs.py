"""The documentation holds together: links, anchors, paths, citations from code, words of README."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("components", "docs", "images", "infra", "pipelines", "requirements", "studies", "tests")
"""Where a path in backticks starts, if it names a file of the repository."""


@cache
def tracked() -> tuple[str, ...]:
    """Files of the repository, links among them not followed."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*FOLDERS, ".github"):
        for place, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found += [Path(place) / name for name in names]
    return tuple(path.relative_to(ROOT).as_posix() for path in found if not path.is_symlink())


def pages() -> list[str]:
    """The documentation, and every other page for people."""
    return [name for name in tracked() if name.endswith(".md") and "golden" not in name]


def without_code(text: str) -> str:
    """The page without its fenced and indented blocks."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as Markdown's own `toc` makes it."""
    text = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", lambda found: found[1] or "", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@cache
def anchors(page: str) -> tuple[str, ...]:
    text = without_code((ROOT / page).read_text())
    return tuple(slug(found) for found in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE))


def broken(page: str) -> list[str]:
    """Links of a page that lead nowhere: to no file, to no heading, or out of the site."""
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code((ROOT / page).read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        found = path.resolve()
        if not found.exists():
            problems.append(f"{page}: {target} is not a file")
        elif anchor and anchor not in anchors(found.relative_to(ROOT).as_posix()):
            problems.append(f"{page}: {target} has no such heading")
        elif page.startswith("docs/") and not found.is_relative_to(ROOT / "docs"):
            problems.append(f"{page}: {target} leaves the site; name the file in backticks")
    return problems


def test_every_link_leads_to_a_file_and_a_heading():
    assert not [problem for page in pages() for problem in broken(page)]


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Out\n")
    text = "# One heading\n[a](#one-heading) [b](#two) [c](none.md) [d](../README.md)\n"
    (tmp_path / "docs" / "page.md").write_text(text)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    anchors.cache_clear()
    assert len(broken("docs/page.md")) == 3
    anchors.cache_clear()


def test_anchors_are_the_same_on_the_site_and_in_the_repository_view():
    """Two renderers, two rules; a heading that somebody links to must not tell them apart."""
    for page in pages():
        headings = re.findall(r"^#{1,6} +(.+?) *$", without_code((ROOT / page).read_text()), re.M)
        for heading in headings:
            bare = re.sub(r"[`*]", "", heading)
            other = re.sub(r"[^\w\s-]", "", bare).strip().lower().replace(" ", "-")
            assert "[" in heading or slug(heading) == other, f"{page}: {heading}"


def paths_named(text: str) -> list[str]:
    """Paths of the repository in backticks; a test's name or a line may follow after `::`."""
    folders = "|".join(FOLDERS)
    named = re.findall(rf"`((?:{folders})/[\w./<>*-]+)(?:::(\w+))?[^`\n]*`", text)
    return ["::".join(filter(None, found)) for found in named]


def test_every_path_and_test_that_the_documentation_names_exists():
    missing = []
    for page in pages():
        if not page.startswith("docs/") and page not in ("README.md", "CONTRIBUTING.md"):
            continue
        for name in paths_named((ROOT / page).read_text()):
            path, _, test = name.partition("::")
            if re.search(r"[<>*]", path):
                continue
            found = (ROOT / path).exists()
            if not found or (test and f"def {test}(" not in (ROOT / path).read_text()):
                missing.append(f"{page}: {name}")
    assert not missing


def cited(text: str) -> list[str]:
    """Pages that a text cites: those of docs/, and those beside studies and tests."""
    return re.findall(r"\b(?:docs|studies|tests)/[\w/-]+\.md(?:#[\w-]+)?", text)


def test_every_page_and_anchor_that_code_cites_exists():
    wrong = []
    for name in tracked():
        if not name.endswith((".py", ".toml", ".yaml", ".yml", ".html", ".sh", "Makefile")):
            continue
        if name == Path(__file__).relative_to(ROOT).as_posix():
            continue
        for citation in cited((ROOT / name).read_text()):
            page, _, anchor = citation.partition("#")
            if not (ROOT / page).is_file() or (anchor and anchor not in anchors(page)):
                wrong.append(f"{name}: {citation}")
    assert not wrong


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    written = {name.removeprefix("docs/") for name in pages() if name.startswith("docs/")}
    assert set(navigation) == written


BUDGETS = {
    "docs/tutorials/": 900,
    "docs/how_to/": 700,
    "docs/explanation/": 1200,
    "docs/cluster/": 1200,
    "CHANGELOG.md": 400,
}
"""Start of the path -> most words of a page. Generated pages and code do not count."""


def words_of(page: str) -> int:
    """Words of a page without code blocks, marks of tables, and generated pages."""
    text = (ROOT / page).read_text()
    if "<!-- Generated by" in text or "<!-- custom-content -->" in text:
        return 0
    return len(re.findall(r"\S*\w\S*", without_code(text)))


def test_pages_stay_within_their_word_limits():
    for page in pages():
        for start, most in BUDGETS.items():
            if page.startswith(start):
                assert words_of(page) <= most, page


# ---- the workshop -------------------------------------------------------------------------------


WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text())
    for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
MAY_PUBLISH = {"contents": "read", "packages": "write", "id-token": "write"}


def _steps(name: str) -> list[dict]:
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_have_read_only_rights_and_pin_actions_by_commit(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    for title, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 360
        publishes = (name, title) == ("images.yml", "publish")
        assert job.get("permissions") == (MAY_PUBLISH if publishes else None)
    text = (ROOT / ".github" / "workflows" / name).read_text()
    assert len(re.findall(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\n", text)) == text.count(
        "uses:"
    )
    for step in _steps(name):
        assert not {"continue-on-error", "if"} & step.keys()
        assert "${{" not in step.get("run", ""), "a name of somebody's could be a command"
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


def test_workflows_run_commands_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runs = [step.get("run", "") for name in WORKFLOWS for step in _steps(name)]
    called = [found for run in runs for found in re.findall(r"^make ([a-z-]+)$", run)]
    assert {"audit", "docs", "planted-bugs", "test-full"} <= set(called) <= set(targets)


def test_nightly_workflow_runs_full_tests_attacks_mutation_and_audit():
    nightly = WORKFLOWS["nightly.yml"]
    assert nightly[True]["schedule"], "`on` is read as true"
    ends = {title: job["steps"][-1]["run"] for title, job in nightly["jobs"].items()}
    assert set(ends.values()) == {"make test-full", "make attacks", "make mutation", "make audit"}
    claimed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    setup = nightly["jobs"]["slow"]["steps"][1]["with"]
    assert sorted(setup["python-version"].split()) == claimed, "test_wheel.py uses each"


def test_an_image_is_scanned_before_it_is_signed_and_both_by_its_digest():
    steps = _steps("images.yml")
    does = [f"{step.get('uses')} {step.get('run')}" for step in steps]
    order = ("planted-bugs", "publish.sh build", "scan-action", "cosign", "publish.sh sign")
    at = {word: next(i for i, text in enumerate(does) if word in text) for word in order}
    assert list(at.values()) == sorted(at.values())
    scan = steps[at["scan-action"]]["with"]
    assert scan["fail-build"] is True
    assert scan["severity-cutoff"] == "high"
    built = "${{ steps.build.outputs.image }}"
    assert scan["image"] == built == steps[at["publish.sh sign"]]["env"]["IMAGE"]
    assert set(WORKFLOWS["images.yml"][True]) == {"push"}, "`on` is read as true"


STUB = """#!/bin/sh
echo "$(basename $0) $*" >> "$CALLS"
case "$*" in
  *metadata-file*) while [ $# -gt 0 ]; do [ "$1" = --metadata-file ] && said=$2; shift; done
    echo '{"light": {"containerimage.digest": "sha256:'$DIGEST'"}}' > "$said";;
  *sbom*) echo '{"bomFormat": "CycloneDX"}';;
esac
"""


def _publish(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Runs the script with programs that only say how they were called."""
    calls, output = folder / "calls", folder / "output"
    for name in ("docker", "cosign"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    environment = {
        **os.environ,
        **{"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "DIGEST": "a" * 64},
        **{"GITHUB_REPOSITORY": "Team/FedEmb", "GITHUB_REF_NAME": "v0.1.0", "GITHUB_SHA": "b" * 40},
        **{"GITHUB_SERVER_URL": "https://github.com", "GITHUB_OUTPUT": str(output)},
    }
    command = [ROOT / "images" / "publish.sh", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    said = output.read_text() if output.exists() else ""
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], said


def test_images_are_published_signed_and_attested_by_digest(tmp_path):
    image = f"ghcr.io/team/fedemb/fedemb-light@sha256:{'a' * 64}"
    code, calls, said = _publish(tmp_path, "build", "light")
    assert code == 0
    assert said == f"image={image}\n"
    assert "--push" in calls[0]
    (tmp_path / "calls").unlink()
    code, calls, _ = _publish(tmp_path, "sign", image)
    assert code == 0
    acts = [line.split()[:2] for line in calls]
    assert acts == [
        ["docker", "run"],
        *(["cosign", act] for act in ("sign", "attest", "verify", "verify-attestation")),
    ]
    assert all(image in line for line in calls)
    assert all("--type cyclonedx" in line for line in calls if "attest" in line)


def unknown_modules(text: str) -> set[str]:
    """Names of Python files in a text that no file of the repository has."""
    shipped = {"preprocessing.py"}  # a release holds `photos.py` under this name
    known = {name.rpartition("/")[2] for name in tracked()} | shipped
    return set(re.findall(r"(?<![\w/<])[a-z][a-z_0-9]+\.py\b", text)) - known


def test_product_and_pages_name_python_files_that_exist():
    """A module that moved is still named in comments: nobody finds what they point to."""
    ours = [name for name in tracked() if name.startswith(("components/", "pipelines/"))]
    texts = {name: (ROOT / name).read_text() for name in (*pages(), *ours) if name[-3:] != "pyc"}
    assert not {name: found for name, text in texts.items() if (found := unknown_modules(text))}
    assert unknown_modules("as in `round_audits.py`") == {"round_audits.py"}
