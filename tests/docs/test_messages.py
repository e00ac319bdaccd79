"""Every text that a user meets is plain English; errors say what to do."""

from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.structure import Module
from tests.docs.messages import Message, messages, messages_of, problems


@pytest.fixture(scope="module")
def catalogue() -> list[Message]:
    return messages()


def message(text: str, kind: str = "error") -> Message:
    return Message(kind, "components/fedemb/keys/x.py", 1, text)


def test_every_message_is_plain(catalogue):
    packages = sorted({item.package for item in catalogue if problems(item)})
    assert not packages, "list them by: python -m tests.docs.messages " + " ".join(packages)


def test_catalogue_holds_every_kind_of_text(catalogue):
    kinds = Counter(item.kind for item in catalogue)
    assert kinds["error"] > 400
    assert kinds["help"] > 80
    assert kinds["output"] > 60
    assert min(kinds["log"], kinds["template"]) > 10


@pytest.mark.parametrize(
    "text",
    [
        "the file X is no archive; replace it",
        "the ledger was not found",
        " ".join(["word"] * 31) + "; replace it",
        "X went wrong. This is bad.",
    ],
)
def test_messages_that_are_not_plain_are_found(text):
    assert problems(message(text))


@pytest.mark.parametrize(
    "text",
    [
        "noise_multiplier must be positive, got X. Set mechanism.noise_multiplier above 0.",
        "No Kubeflow API host. Pass --host.",
        "the file X was changed; replace it",
    ],
)
def test_plain_messages_are_accepted(text):
    assert not problems(message(text))


def test_messages_are_extracted_from_each_form_of_code(tmp_path):
    source = tmp_path / "one.py"
    source.write_text(
        "raise InputError(f'no file {name}; ' + ('add it' if bad else f'drop {other}'))\n"
        "say('first line', f'second {line}', err=True)\n"
        "_log.info('round %d of %s', 1, 2)\n"
        "Option(help='Number of ' 'users.')\n"
    )
    module = Module("fedemb.one", source)
    found = [item.text for item in messages_of(module, Path(tmp_path))]
    assert found == [
        "no file X; add it",
        "no file X; drop X",
        "first line",
        "second X",
        "round X of X",
        "Number of users.",
    ]
