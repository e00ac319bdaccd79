"""The documentation holds together: links, anchors, paths, citations from code, words of README."""

import os
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("components", "docs", "images", "infra", "pipelines", "requirements", "studies", "tests")
"""Where a path in backticks begins, if it names a file of the repository."""
MADE_LATER = ("components/fedemb/planted_bug_suite.json",)
"""Written by a command, so not in a fresh clone."""
NOTES = r"\b(dp|paper|platform|design|performance|utility|dpsgd)\.md\b"
"""Pages that were once cited without being in the repository."""


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
            problems.append(f"{page}: {target} is no file")
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


def test_headings_of_a_page_have_anchors_of_their_own():
    for page in pages():
        if page.startswith("docs/"):
            assert len(anchors(page)) == len(set(anchors(page))), page


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
            if re.search(r"[<>*]", path) or path in MADE_LATER:
                continue
            found = (ROOT / path).exists()
            if not found or (test and f"def {test}(" not in (ROOT / path).read_text()):
                missing.append(f"{page}: {name}")
    assert not missing


def cited(text: str) -> list[str]:
    return re.findall(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?", text)


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


def test_readme_is_short():
    words = re.findall(r"\S*\w\S*", without_code((ROOT / "README.md").read_text()))
    assert len(words) <= 900


# ---- the workshop -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ci.yml", "nightly.yml"])
def test_workflows_read_only_and_take_actions_by_commit(name):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + 40 * "0"))


def test_workflows_run_commands_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = [(ROOT / ".github" / "workflows" / n).read_text() for n in ("ci.yml", "nightly.yml")]
    called = re.findall(r"- run: make ([a-z-]+)", "".join(texts))
    assert called
    assert set(called) <= set(targets)


def test_hooks_call_the_locked_tools():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    for hook in hooks[0]["hooks"]:
        assert hook["language"] == "system"
        assert re.match(r"\.venv/bin/|make ", hook["entry"])


def test_lock_of_the_site_pins_every_package_with_a_hash_and_names_no_index():
    lock = (ROOT / "requirements" / "docs.txt").read_text()
    assert lock.count("--hash=sha256:") >= len(re.findall(r"^[\w.-]+==", lock, re.M)) > 10
    assert not re.search(r"--.*index|--find-links|^-e |git\+|https?:", lock, re.MULTILINE)
