"""Forgetting a user: the next partition is that of a world in which they never were."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedemb.data.hashing import Hasher
from fedemb.errors import StorageError
from fedemb.keys import LocalKeyStore, open_key_store, partition_key
from fedemb.keys.deletion_marks import check_deletion_marks, mark_deleted, read_deletion_marks
from fedemb.pipelines.cli.main import app
from fedemb.storage.local import LocalStore
from tests.kit import ledger_kit
from tests.kit.ledger_kit import with_policy_key
from tests.kit.pipeline_runs import honest_run
from tests.kit.pipeline_runs.partition_run import KEY, Partitioner, rows_of


def test_forgotten_user_is_as_if_never_there(tmp_path):
    partition = Partitioner(tmp_path)
    rows, hasher = rows_of(12), Hasher(KEY)
    deletion_marks = str(tmp_path / "deletion_marks")
    keys = with_policy_key(open_key_store(str(tmp_path / "keys of deletion marks")))
    mark = hasher.deletion_mark(hasher.user_key("user 3"))
    assert mark_deleted(deletion_marks, keys, "weekly", mark)
    assert not mark_deleted(deletion_marks, keys, "weekly", mark)
    forgot = partition(rows, storage__deletion_marks=deletion_marks, policy__policy_id="weekly")
    never = partition([row for row in rows if row["user_id"] != "user 3"])
    assert forgot.records() == never.records()
    assert forgot.records("evaluation") == never.records("evaluation")
    assert forgot.groups() == never.groups()
    assert forgot.counts["dropped_forgotten"] == 3
    assert partition(rows).counts.get("dropped_forgotten", 0) == 0


def test_deletion_mark_tells_nothing_about_whom(tmp_path):
    hasher = Hasher(KEY)
    keys = with_policy_key(open_key_store(str(tmp_path / "keys")))
    uri = str(tmp_path / "deletion_marks")
    mark_deleted(uri, keys, "weekly", hasher.deletion_mark(hasher.user_key("user 3")))
    (name,) = read_deletion_marks(uri, "weekly")
    assert hasher.user_key("user 3").hex() not in name


def test_store_of_deletion_marks_that_is_gone_is_refused_not_taken_for_empty(tmp_path):
    keys = with_policy_key(open_key_store(str(tmp_path / "keys")))
    there, uri = tmp_path / "deletion_marks", str(tmp_path / "deletion_marks")
    check_deletion_marks(None, keys, "weekly")  # a policy that never had one
    check_deletion_marks(uri, keys, "weekly")
    mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(b"3"))
    check_deletion_marks(uri, keys, "weekly")
    assert len(read_deletion_marks(uri, "weekly")) == 1
    there.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="would train again"):
        check_deletion_marks(uri, keys, "weekly")
    with pytest.raises(StorageError, match="deletion_marks is null"):
        check_deletion_marks(None, keys, "weekly")
    assert not there.exists()
    other = with_policy_key(open_key_store(str(tmp_path / "other keys")))
    with pytest.raises(StorageError, match="belong to a policy with another key"):
        check_deletion_marks(str(tmp_path / "elsewhere"), other, "weekly")
    with pytest.raises(StorageError, match="belong to a policy with another key"):
        mark_deleted(str(tmp_path / "elsewhere"), other, "weekly", "a" * 64)
    (tmp_path / "elsewhere").rename(there)
    check_deletion_marks(uri, keys, "weekly")


@pytest.fixture
def five(tmp_path):
    """A store of five deletion marks: its keys, its address and their files."""
    keys = with_policy_key(open_key_store(str(tmp_path / "keys")))
    uri = str(tmp_path / "deletion_marks")
    marks = [Hasher(KEY).deletion_mark(bytes([number])) for number in range(5)]
    for mark in marks:
        assert mark_deleted(uri, keys, "weekly", mark)
    return keys, uri, [tmp_path / "deletion_marks" / "weekly" / mark for mark in marks]


@pytest.mark.parametrize("lost", [(0,), (2,), (4,), (3, 4), (0, 1, 2, 3, 4)])
def test_deletion_mark_that_was_lost_is_noticed_and_can_be_made_good(five, lost):
    keys, uri, files = five
    for number in lost:
        files[number].unlink()
    with pytest.raises(StorageError, match="deletion markers of policy"):
        check_deletion_marks(uri, keys, "weekly")
    with pytest.raises(StorageError, match="are missing"):  # nor does the next one hide it
        mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(b"six"))
    for number in lost:
        assert mark_deleted(uri, keys, "weekly", files[number].name, lost=True)
    check_deletion_marks(uri, keys, "weekly")
    assert mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(b"six"))


@pytest.mark.parametrize("owner", [b"", b"\0", b"\xff"])
def test_deletion_marks_of_any_other_owner_are_refused(five, owner):
    keys, uri, files = five
    (files[0].parent / "policy.key").write_bytes(owner)
    with pytest.raises(StorageError, match="belong to a policy with another key"):
        check_deletion_marks(uri, keys, "weekly")
    with pytest.raises(StorageError, match="belong to a policy with another key"):
        mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(b"six"))


def test_planted_key_store_that_does_not_count_overlooks_the_loss(five, monkeypatch):
    """The fault the test above is for."""
    keys, uri, files = five
    files[2].unlink()
    monkeypatch.setattr(LocalKeyStore, "used", lambda *_: False)
    check_deletion_marks(uri, keys, "weekly")


@pytest.mark.parametrize("act", ["create", "destroy"])
def test_killed_while_a_deletion_mark_is_counted_goes_on_and_still_notices(five, monkeypatch, act):
    keys, uri, files = five

    def killed(self, name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LocalKeyStore, act, killed)
        with pytest.raises(KeyboardInterrupt):
            mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(b"six"))
    check_deletion_marks(uri, keys, "weekly")
    assert mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(b"seven"))
    files[0].unlink()
    with pytest.raises(StorageError, match="deletion markers"):
        check_deletion_marks(uri, keys, "weekly")


def test_killed_at_any_write_of_the_first_deletion_mark_goes_on(tmp_path, monkeypatch):
    keys = with_policy_key(open_key_store(str(tmp_path / "keys")))
    mark = Hasher(KEY).deletion_mark(b"3")
    for number, (store, act) in enumerate(
        [(LocalStore, "create"), (LocalKeyStore, "create"), (LocalKeyStore, "destroy")]
    ):
        uri, policy_id = str(tmp_path / f"deletion marks {number}"), f"weekly-{number}"
        with_policy_key(keys, policy_id)
        with monkeypatch.context() as patched:
            patched.setattr(store, act, _killed)
            with pytest.raises(KeyboardInterrupt):
                mark_deleted(uri, keys, policy_id, mark)
        check_deletion_marks(uri, keys, policy_id)
        mark_deleted(uri, keys, policy_id, mark)
        check_deletion_marks(uri, keys, policy_id)
        assert read_deletion_marks(uri, policy_id) == {mark}


def _killed(*_):
    raise KeyboardInterrupt


def _forbidden(*_):
    raise PermissionError("a step may look, not write")


def test_steps_only_look(tmp_path, monkeypatch):
    """Partition reads keys and deletion markers and never writes them."""
    keys = with_policy_key(open_key_store(str(tmp_path / "keys")))
    uri = str(tmp_path / "deletion_marks")
    for user in (None, b"3", b"4"):
        if user:
            mark_deleted(uri, keys, "weekly", Hasher(KEY).deletion_mark(user))
        with monkeypatch.context() as patched:
            for store in (LocalStore, LocalKeyStore):
                patched.setattr(store, "create", _forbidden)
            check_deletion_marks(uri, keys, "weekly")


def test_policies_share_an_address_and_none_trains_whom_another_forgot(tmp_path):
    keys = with_policy_key(open_key_store(str(tmp_path / "keys")), "first", "second")
    uri = str(tmp_path / "deletion_marks")
    for policy_id in ("first", "second"):
        check_deletion_marks(uri, keys, policy_id)
    mark_deleted(uri, keys, "first", Hasher(KEY).deletion_mark(b"3"))
    check_deletion_marks(uri, keys, "first")
    wanted = "more deletion markers of 'first' than of policy 'second'"
    with pytest.raises(StorageError, match=wanted) as refused:
        check_deletion_marks(uri, keys, "second")
    told = str(refused.value).replace(uri, "")
    assert not re.search(r"\d", told), "the number of deleted users is in no log"
    mark_deleted(uri, keys, "second", Hasher(b"another key").deletion_mark(b"3"))
    for policy_id in ("first", "second"):
        check_deletion_marks(uri, keys, policy_id)
        assert len(read_deletion_marks(uri, policy_id)) == 1
    assert read_deletion_marks(uri, "first") != read_deletion_marks(uri, "second")
    check_deletion_marks(str(tmp_path / "of other people"), keys, "third")


def test_new_policy_that_would_train_the_forgotten_is_refused_before_it_is_charged(tmp_path):
    deletion_marks = str(tmp_path / "deletion_marks")
    places = {"storage.deletion_marks": deletion_marks}
    first = honest_run.start(tmp_path / "a", "a", tmp_path / "policy", **places)
    first.do_plan()
    first.do_reserve()
    mark_deleted(deletion_marks, first.keys, "weekly", Hasher(KEY).deletion_mark(b"3"))
    second = honest_run.start(
        tmp_path / "b", "b", tmp_path / "policy", **places, **{"policy.policy_id": "monthly"}
    )
    second.do_plan()
    with pytest.raises(StorageError, match="would train again"):
        second.do_reserve()
    assert not second.ledger().state.attempts
    mark_deleted(deletion_marks, second.keys, "monthly", Hasher(b"another key").deletion_mark(b"3"))
    second.do_reserve()
    assert second.ledger().state.attempts


def test_no_store_of_deletion_marks_forgets_nobody():
    assert read_deletion_marks(None, "weekly") == frozenset()


def test_command_without_a_policy_says_what_is_missing():
    done = CliRunner().invoke(app, ["forget", "--config", "quickstart"], input="someone\n")
    assert done.exit_code != 0
    assert "storage.deletion_marks must be set" in str(done.exception)


def test_command_takes_no_list_of_which_it_would_forget_the_first_alone(tmp_path):
    command = ["forget", "--config", "quickstart", "--policy", str(tmp_path)]
    done = CliRunner().invoke(app, command, input="someone\nsomebody else\n")
    assert "holds 2 lines" in str(done.exception)
    assert "some" not in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_command_takes_a_file_of_ids_and_forgets_all_or_nobody(tmp_path):
    kit = ledger_kit.make(tmp_path, users=ledger_kit.users(buckets=4))
    marks = tmp_path / "deletion_marks"
    stores = {"ledger": kit.ledger_uri, "keys": kit.keys_uri, "deletion_marks": str(marks)}
    command = ["forget", "--config", "quickstart", "--set", "policy.policy_id=weekly"]
    for name, uri in stores.items():
        command += ["--set", f"storage.{name}={uri}"]
    ids = tmp_path / "ids.txt"
    command += ["--ids", str(ids)]
    for content, says in ((b"", "holds no user id"), (b"\xff\xfe\x00", "cannot be read as text")):
        ids.write_bytes(content)
        assert says in str(CliRunner().invoke(app, command).exception)
    ids.write_text("ada\n\u200b\n")  # an invisible character
    assert "id 2 is not a user id; nothing was changed" in str(
        CliRunner().invoke(app, command).exception
    )
    assert not marks.exists()
    people = [f"user {number}" for number in range(20)]
    ids.write_text("\n".join([*people, "", " user 3 ", ""]))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.exception
    assert "20 deleted from the next partition on; 0 were deleted before" in done.output
    assert "no release was trained on the user's block" in done.output
    assert "user 3" not in done.output
    hasher = Hasher(partition_key(kit.keys, "weekly"))
    wanted = {hasher.deletion_mark(hasher.user_key(person)) for person in people}
    assert read_deletion_marks(str(marks), "weekly") == wanted
    ids.write_text("\n".join([*people, "somebody else"]))
    again = CliRunner().invoke(app, command)
    assert "1 deleted from the next partition on; 20 were deleted before" in again.output


def test_command_names_releases_of_the_users_block_whatever_the_cohort_and_nobody_else(tmp_path):
    kit = ledger_kit.make(tmp_path, users=ledger_kit.users(cohort="month", buckets=4))
    hasher = Hasher(partition_key(with_policy_key(kit.keys), "weekly"))
    secret = "ada.lovelace@example.org"
    mine = hasher.bucket(hasher.user_key(secret), 4)
    ledger = kit.open()
    shas = dict.fromkeys(("model_sha", "report_sha", "bundle_sha"), ledger_kit.sha("x"))
    theirs = (mine + 1) % 4
    runs = {"old": f"2025-11/{mine}", "other": f"2026-01/{theirs}", "open": f"2026-01/{mine}"}
    runs |= {"bound": f"2026-02/{mine}", "bound by others": f"2026-02/{theirs}"}
    trials = {"trial": f"2025-12/{mine}", "voided": f"2025-12/{mine}", "far": f"2025-12/{theirs}"}
    for run, block in {**runs, **trials}.items():
        purpose = "simulation" if run in trials else "release"
        content = ledger_kit.content(noise=6.0, blocks=(block,), purpose=purpose)
        reservation = ledger.reserve(run_id=run, content=content)
        if run == "voided":
            ledger.void(reservation, "typo")
        elif run.startswith("bound"):
            ledger_kit.bind(ledger, reservation)
        elif run != "open" and run not in trials:
            ledger_kit.bind(ledger, reservation)
            ledger_kit.commit(kit, ledger, reservation, 20)
            ledger.release(reservation, **shas, name="embedding", version=run)
    deletion_marks = tmp_path / "deletion_marks"
    stores = {"ledger": kit.ledger_uri, "keys": kit.keys_uri, "deletion_marks": str(deletion_marks)}
    command = ["forget", "--config", "quickstart", "--set", "policy.policy_id=weekly"]
    for name, uri in stores.items():
        command += ["--set", f"storage.{name}={uri}"]
    done = CliRunner().invoke(app, command, input=f" {secret}\n")
    assert done.exit_code == 0, done.exception
    assert "deleted from the next partition on" in done.output
    assert "embedding old: epsilon" in done.output
    assert "embedding other" not in done.output
    assert "may hold this user: open, bound\n" in done.output
    assert "may include this user: bound." in done.output
    assert "all runs of the policy together by epsilon 4 at delta" in done.output
    assert secret not in done.output
    assert "simulations that may have trained on this user: trial. No guarantee" in done.output
    assert "the same ledger has policies" not in done.output
    mark = hasher.deletion_mark(hasher.user_key(secret))
    assert read_deletion_marks(str(deletion_marks), "weekly") == {mark}
    assert not any(secret in str(path) for path in tmp_path.rglob("*"))
    again = CliRunner().invoke(app, command, input=f"{secret}\n")
    assert "was deleted before" in again.output


def test_command_names_the_policies_under_which_the_user_still_trains(tmp_path):
    """`init` of a second policy says so too, and neither command needs more than the ids again."""
    settings = tmp_path / "run.yaml"
    settings.write_text(json.dumps(honest_run.config().model_dump(mode="json")))
    names = ("ledger", "keys", "deletion_marks")
    ledger, keys, deletion_marks = (str(tmp_path / name) for name in names)

    def fedemb(policy_id, *words, text=None):
        command = [*words, "--config", str(settings), "--set", f"policy.policy_id={policy_id}"]
        done = CliRunner().invoke(app, command, input=text)
        assert done.exit_code == 0, done.exception
        return done.output

    init = ("ledger", "init", "--ledger", ledger, "--keys", keys)
    assert "deleted there" not in fedemb("weekly", *init)
    assert "Users deleted there are not deleted here" in fedemb("monthly", *init)
    places = {"ledger": ledger, "keys": keys, "deletion_marks": deletion_marks}
    forget = ["forget"]
    for name, uri in places.items():
        forget += ["--set", f"storage.{name}={uri}"]
    assert "not deleted: monthly." in fedemb("weekly", *forget, text="ada\n")
    assert "not deleted" not in fedemb("monthly", *forget, text="ada\n")
    assert "not deleted" not in fedemb("weekly", *forget, text="ada\n")
    assert "not deleted: monthly." in fedemb("weekly", *forget, text="bob\n")
