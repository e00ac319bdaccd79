"""Every path of the mutation groups exists, so that a renamed room cannot drop out of the run."""

import pytest

from tests.mutation import groups


@pytest.mark.parametrize("name", groups.GROUPS)
def test_every_path_of_a_group_exists(name):
    group = groups.GROUPS[name]
    root = groups.REPOSITORY
    missing = [place for place in group.code if not (root / "components" / place).exists()]
    missing += [place for place in group.tests if not (root / "tests" / place).exists()]
    assert missing == []


def test_every_room_of_the_guarantee_is_in_a_group():
    rooms = {place for group in groups.GROUPS.values() for place in group.code}
    wanted = {"fedemb/" + room for room in ("engine", "training", "keys", "ledger", "gate")}
    assert wanted | {"fedemb/privacy", "train_dp_fedemb", "train_dp_sgd"} <= rooms


def test_every_file_that_is_changed_has_a_group():
    changed = groups.files()
    assert all(groups.group_of(file) for file in changed)
    assert {groups.group_of(file) for file in changed} == groups.GROUPS.keys()


def test_warm_tests_exist():
    for name, test in groups.WARM.items():
        texts = [
            path.read_text()
            for place in groups.GROUPS[name].tests
            for path in (groups.REPOSITORY / "tests" / place).rglob("*.py")
        ]
        assert any(f"def {test}(" in text for text in texts)
