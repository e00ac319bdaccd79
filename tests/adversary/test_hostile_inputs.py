"""Hostile inputs of users end in one sentence or are left out."""

import json
import os
import signal

import pytest

from fedemb.config import SourceConfig
from fedemb.data.photos import BadImageError
from fedemb.data.sources import find_parts, image_files, read_part, split_part
from fedemb.errors import ArtifactError, ConfigError, FedEmbError, InputError
from fedemb.foundation.document import encode
from fedemb.keys import open_key_store
from fedemb.pipelines.run.directory import RunDirectory, RunState, signed_utility
from fedemb.pipelines.run.load_config import load_config
from fedemb.pipelines.run.local import closing_lines
from fedemb.pipelines.run.pages import collect_reports, render_index
from fedemb.storage import open_store
from tests.adversary.attacks.inputs import OBJECTS, make_object
from tests.kit.cli import fedemb
from tests.kit.pipeline_runs import honest_run

PRESET = "quickstart"


def _one_sentence(error, *, at_most=500):
    assert "\n" not in str(error)
    assert len(str(error)) < at_most


# ---- configurations ------------------------------------------------------------------------------

NOT_YAML = {
    "twice": "policy: {delta: 0.1}\npolicy: {delta: 0.2}",
    "twice inside": "policy: {delta: 0.1, delta: 0.2}",
    "twice in flow": "{a: 1, b: 2, a: 3}",
    "deep lists": "[" * 5000 + "]" * 5000,
    "deep objects": "{a: " * 5000 + "}" * 5000,
    "deep, never closed": "[" * 100_000,
    "deep dashes": "- " * 5000,
    "deep questions": "? " * 5000,
    "alias": "a: &x [1]\nb: *x",
    "billion laughs": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "endless alias": "a: &a [*a]",
    "merge": "a: &a {b: 1}\nc: {<<: *a}",
    "code": "a: !!python/object/apply:os.system [true]",
    "key is a list": "{[1]: 2}",
    "no such day": "a: 2026-13-45",
    "nul": "a: \x00",
    "too long": "a: " + "x" * (1 << 21),
    "tab": "a:\n\t- b",
}


@pytest.mark.parametrize("name", NOT_YAML)
def test_hostile_yaml_is_refused_with_a_one_line_error(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(NOT_YAML[name])
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    _one_sentence(refused.value)
    with pytest.raises(ConfigError) as refused:
        load_config(PRESET, [f"mechanism.rounds={NOT_YAML[name]}"])
    _one_sentence(refused.value)


# ---- run directories -----------------------------------------------------------------------------

BROKEN = {
    "braces": b"{{{",
    "not text": b"\xff\xfe\x00",
    "list": b"[]",
    "empty": b"",
    "number": b"7",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", ["config.yaml", "state.json", "beam_options.json"])
def test_corrupt_file_in_a_run_directory_is_a_one_line_error(tmp_path, name, broken):
    run = RunDirectory.create(tmp_path, "run", honest_run.config())
    (run.root / name).write_bytes(BROKEN[broken])
    acts = {
        "config.yaml": (run.config, lambda: fedemb("run", "--resume", run.root)),
        "state.json": (run.read_state, lambda: fedemb("runs", run.root)),
        "beam_options.json": (run.beam_options,),
    }
    if (name, broken) == ("beam_options.json", "list"):
        assert run.beam_options() == ()
        return
    for act in acts[name]:
        with pytest.raises(ArtifactError, match=f"{name} of run run was changed or cut") as refused:
            act()
        _one_sentence(refused.value)
    assert name == "beam_options.json" or "not signed" in fedemb("runs", "--runs", run.root.parent)


def _row(run):
    """The run's row of `fedemb runs`, which hides no other; its gain is that of the report."""
    row = fedemb("runs", "--runs", run.root.parent)
    if "not signed" in row or row.split()[-1] == "-":
        signed_utility(run)  # why
    return row


def _closing(run):
    """The closing lines, which say how the run ended in any case."""
    lines = closing_lines(run, RunState(exit_code=4, message="stopped"))
    assert lines[-1] == "release: none (the pipeline stopped: stopped)"
    for line in lines:
        name, _, why = line.partition(": not known (")
        if why:
            raise FedEmbError(why)
        assert not name.endswith("0.01")
    return "\n".join(lines)


SHOWN_BY = {
    "runs --json": ("privacy_report", lambda run: fedemb("runs", run.root, "--json")),
    "closing lines": ("privacy_report", _closing),
    "closing lines, utility": ("utility_report", _closing),
    "first page": ("privacy_report", render_index),
    "first page, utility": ("utility_report", render_index),
    "runs": ("utility_report", _row),
}
"""Who shows a report of a run: which, and how."""
STEPS = {
    "audit_report": "audit-privacy",
    "model": "train-model",
    "pretrained": "pretrain-public",
    "privacy_plan": "plan-privacy",
    "reservation": "reserve-budget",
    "users": "partition-users",
    "privacy_report": "account-privacy",
    "utility_report": "evaluate-model",
}
BETTER = {
    "privacy_report": lambda fields: fields["accounting"].update(epsilon=0.01),
    "utility_report": lambda fields: fields["retrieval"].update(queries=999_999),
}


@pytest.fixture
def shown(allowed, other, tmp_path):
    """The run directory of an honest run, in a ledger that holds another one too."""
    stores = {"ledger": other.ledger_uri, "keys": other.keys_uri}
    config = allowed.config.updated({f"storage.{name}": uri for name, uri in stores.items()})
    run = RunDirectory.create(tmp_path, allowed.run_id, config)
    for name, path in (
        ("privacy_plan", allowed.plan),
        ("privacy_report", allowed.report),
        ("utility_report", allowed.utility),
    ):
        _newest(run, name, path.read_bytes(), 1)
    return run


def _newest(run, name, data, number):
    path = run.public / f"fedemb-{number}" / STEPS[name] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (number, number))


@pytest.mark.long
@pytest.mark.parametrize("shows", SHOWN_BY)
def test_unsigned_report_is_not_shown(shown, allowed, other, shows):
    """A newer file in the public folder is not taken for a report of the run."""
    name, show = SHOWN_BY[shows]
    assert show(shown)
    honest = {"privacy_report": allowed.report, "utility_report": allowed.utility}[name]
    fields = json.loads(honest.read_text())
    BETTER[name](fields)
    _newest(shown, name, encode(fields), 2)
    with pytest.raises(FedEmbError, match="does not match its content"):
        show(shown)
    of_tuesday = {"privacy_report": other.report, "utility_report": other.utility}[name]
    _newest(shown, name, of_tuesday.read_bytes(), 3)
    with pytest.raises(FedEmbError, match="belongs to another run"):
        show(shown)


# ---- files of images -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        {"format": "parquet"},
        {"format": "tfrecord"},
        {"format": "csv", "image_root": "."},
        {"format": "csv", "image_root": ".", "columns": {"image_id": "photo"}},
    ],
    ids=["parquet", "tfrecord", "csv without its columns", "csv without a header"],
)
def test_read_errors_omit_file_names_that_may_identify_users(tmp_path, source):
    """Errors of a step are kept in the public root."""
    kind = source["format"]
    for user in ("ada", "bob"):
        file = tmp_path / f"user={user}" / f"{user}-0.{kind}"
        file.parent.mkdir()
        file.write_bytes(b"lovelace.png,ada.lovelace\nx.png,ada.lovelace\n")
    config = SourceConfig.model_validate({"uri": str(tmp_path), **source})

    def read_all():
        for part in find_parts(config, ["user_id"]):
            for piece in split_part(part):
                list(read_part(config, piece, ["user_id"]))

    with pytest.raises(InputError) as error:
        read_all()
    assert f"file 1 of 2 of {tmp_path} (by name)" in str(error.value)
    assert not any(name in str(error.value) for name in ("ada", "bob", "lovelace"))


# ---- folders of images ---------------------------------------------------------------------------


@pytest.fixture
def album(tmp_path):
    """Two people with an image each, and what does not belong into their folders."""
    root = tmp_path / "album"
    for user in ("ada", "bob"):
        (root / user).mkdir(parents=True)
        (root / user / "one.png").write_bytes(b"an image of " + user.encode())
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(b"not in the album")
    return root


def _read_all(root):
    """What a reader finds: names and bytes; ends by an alarm if it waits for somebody."""
    columns = {"user_id": "user", "label": None}
    source = SourceConfig.model_validate(
        {"uri": str(root), "format": "image_folder", "columns": columns}
    )
    files, found = image_files(source), {}

    def waited(*_):
        raise TimeoutError("a reader waits for ever")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(10)
    try:
        for part in find_parts(source, ["user"]):
            for piece in split_part(part):
                for batch in read_part(source, piece, ["user"]):
                    for user, name in zip(batch.columns["user"], batch.images, strict=True):
                        try:
                            found[user, name] = files.read(name)
                        except BadImageError:
                            found[user, name] = None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return found


HONEST = {("ada", "ada/one.png"): b"an image of ada", ("bob", "bob/one.png"): b"an image of bob"}


LINKS = {
    "device": ("ada/zero.png", "/dev/zero"),
    "file outside": ("ada/link.png", "ALBUM/../outside/secret.png"),
    "file outside, relative": ("ada/link.png", "../../outside/secret.png"),
    "file of another person": ("bob/link.png", "../ada/one.png"),
    "itself": ("ada/link.png", "link.png"),
    "nothing": ("ada/link.png", "nothing.png"),
    "person": ("eve", "ALBUM/ada"),
    "folder outside": ("eve", "ALBUM/../outside"),
    "whole disk": ("eve", "/"),
    "folder outside, deeper": ("ada/more", "ALBUM/../outside"),
}
"""Where a link leads -> its name, and its target."""
ODD_FILES = {
    **{
        what: lambda root, what=what: make_object(
            root / "ada" / "odd.png", what, root.parent / "outside" / what
        )
        for what in OBJECTS
    },
    **{
        f"link to {name}": lambda root, link=link, to=to: (root / link).symlink_to(
            to.replace("ALBUM", str(root))
        )
        for name, (link, to) in LINKS.items()
    },
}


@pytest.mark.parametrize("odd", ODD_FILES)
def test_symlinks_and_special_files_in_an_image_folder_are_not_read(album, odd):
    ODD_FILES[odd](album)
    found = _read_all(album)
    assert {key: data for key, data in found.items() if data is not None} == HONEST
    assert {user for user, _ in found} == {"ada", "bob"}


# ---- file systems --------------------------------------------------------------------------------


def test_store_files_are_not_writable_by_others_at_any_umask(tmp_path):
    before = os.umask(0)
    try:
        honest_run.start(tmp_path / "run").do_plan()
        store = open_store(tmp_path / "ledger")
        store.create("weekly/heads/00000001.json", b"{}")
        store.write("weekly/notes.json", b"{}")
        open_key_store(str(tmp_path / "policy" / "keys")).create("policy/weekly")
        open_store(tmp_path / "releases").create_tree(tmp_path / "ledger", "glyphs/1.0")
        open_store(tmp_path / "private").upload(tmp_path / "ledger/weekly/notes.json", "a/b/c")
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert not path.stat().st_mode & 0o022, path


# ---- what goes out -------------------------------------------------------------------------------


def test_bundle_contains_neither_store_addresses_nor_user_accounts(allowed, tmp_path):
    import getpass

    run = honest_run.copy_of(allowed, tmp_path / "run")
    places = {"public_root": "gs://inside-public", "private_root": "gs://inside-private"}
    run.config = run.config.updated({f"storage.{name}": uri for name, uri in places.items()})
    run.do("account gate release")
    assert run.problems() == []
    for path in run.bundle.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"inside-" not in data, path
            assert str(tmp_path).encode() not in data, path
    actors = {json.loads(line)["actor"] for line in (run.bundle / "ledger.jsonl").open()}
    assert actors == {"unnamed"} != {getpass.getuser()}


def test_pages_are_rendered_from_signed_reports_not_copied_from_public_root(shown, allowed):
    """A person who may write there can add any page, report or plan."""
    for name, path in (
        ("audit_report", allowed.audit),
        ("reservation", allowed.reservation),
        ("users", allowed.users),
    ):
        _newest(shown, name, path.read_bytes(), 1)
    for name, folder in (("model", allowed.model), ("pretrained", allowed.root / "pretrained")):
        for file in folder.rglob("*"):
            target = shown.public / "fedemb-1" / STEPS[name] / name / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    forged = b"<h1>epsilon 0.01</h1><!-- way back -->"
    for name in ("privacy_page", "utility_page", "audit_page"):
        path = shown.public / "fedemb-2" / "account-privacy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(forged)
    pages = collect_reports(shown)
    assert set(pages) == {"privacy_report", "utility_report", "audit_report"}
    for name, page in pages.items():
        text = page.read_text()
        assert "epsilon 0.01</h1>" not in text
        assert "All of this run" in text
        assert (shown.reports / f"{name}.json").read_bytes()
    reservation = json.loads(allowed.reservation.read_text())
    reservation["sequence"] += 1
    _newest(shown, "reservation", encode(reservation, compact=True), 2)
    assert "privacy_report" not in collect_reports(shown), "it names another reservation"
    assert not (shown.reports / "privacy_report.html").exists()
    fields = json.loads(allowed.audit.read_text())
    fields["users_at_most"] += 1
    _newest(shown, "audit_report", encode(fields), 2)
    with pytest.raises(FedEmbError, match="does not match its content"):
        collect_reports(shown)
