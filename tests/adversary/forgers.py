"""Ways to forge a document of a run, and the real steps that read it.

`public`: anyone who can write the public root and has no key, or has keys that were retired.
`inside`: somebody who holds the key of the document's own step and may write what they like.
"""

import copy
import json
import os
from contextlib import contextmanager

from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, sign_document
from fedemb.steps import audit_privacy, evaluate_model, partition_users, train_model
from fedemb.training import attempt
from tests.kit.pipeline_runs import honest_run


def _set(*path_and_value):
    *path, leaf, value = path_and_value

    def change(fields):
        for part in path:
            fields = fields[part]
        assert fields[leaf] != value
        fields[leaf] = value

    return change


WISHES = {
    "plan": _set("epsilon_rdp", 0.01),
    "reservation": _set("body", "rounds", 600),
    "users": _set("virtual_clients", 4000),
    "start": _set("weights_sha", "a" * 64),
    "card": _set("weights_sha", "a" * 64),
    "audit": _set("self_test", "planted_leak", {"value": 0.99, "low": 0.98, "high": 1.0}),
    "utility": _set("retrieval", "queries", 999_999),
    "report": _set("accounting", "epsilon", 0.01),
    "verdict": _set("reasons", ["fine"]),
}
"""Document -> what a forger would like it to say."""

READERS = {
    "plan": ("reserve", "train", "account", "gate", "release"),
    "reservation": ("partition", "train", "account", "gate", "release"),
    "users": ("train", "evaluate", "audit", "account", "gate", "release"),
    "start": ("train", "evaluate", "audit"),
    "card": ("evaluate", "audit", "account", "gate", "release"),
    "audit": ("account", "gate", "release"),
    "utility": ("account", "gate", "release"),
    "report": ("gate", "release"),
    "verdict": ("release",),
}
"""Document -> the steps that read it."""


def path_of(run, name):
    """Where a document of a run lies."""
    return run.model / "model.json" if name == "card" else getattr(run, name)


def _unsigned(fields, **_):
    fields["signature"] = None


def _kept(fields, **_):
    """What it says is changed, and the signature stays."""


def _own_key(fields, *, role, **_):
    fields.update(sign_document(fields, Signer(role, os.urandom(32))))


def _own_key_under_a_trusted_name(fields, *, role, **_):
    trusted = fields["signature"]["key_id"]
    _own_key(fields, role=role)
    fields["signature"]["key_id"] = trusted


def _stolen(fields, *, run, name, **_):
    other = "plan" if name != "plan" else "users"
    fields["signature"] = json.loads(path_of(run, other).read_text())["signature"]


def _other_role(fields, *, run, role, **_):
    """By the key of another step, which a thief of that step has."""
    other = "gate" if role != "gate" else "report"
    fields.update(sign_document(fields, Signer.newest(run.keys, other)))


def _other_role_renamed(fields, *, run, role, **_):
    """By the same key, under the name of the right one."""
    trusted = fields["signature"]["key_id"]
    _other_role(fields, run=run, role=role)
    fields["signature"]["key_id"] = trusted


def _retired_key(fields, *, run, role, **_):
    """By the step's own key of last year, which was retired before this run."""
    fields.update(sign_document(fields, Signer.load_or_create(run.keys, role, 1)))


def _other_algorithm(fields, **_):
    fields["signature"]["algorithm"] = "none"


def _signature_in_capitals(fields, **_):
    fields["signature"]["value"] = fields["signature"]["value"].upper()


PUBLIC = {
    way.__name__.strip("_"): way
    for way in (
        _unsigned,
        _kept,
        _own_key,
        _own_key_under_a_trusted_name,
        _stolen,
        _other_role,
        _other_role_renamed,
        _retired_key,
        _other_algorithm,
        _signature_in_capitals,
    )
}
"""What is done to the signature of a document that says what the forger wishes."""


def _later_version(fields):
    name, version = fields["schema"].rsplit("/", 1)
    fields["schema"] = f"{name}/{int(version) + 1}"


def _other_kind(fields):
    kinds = ("model", "verdict")
    kind = kinds[fields["schema"].split("/")[1] == kinds[0]]
    fields["schema"] = f"fedemb/{kind}/1"


def _free_text(fields):
    fields["sentence"] = "99.9 % of all pairs; Ada Lovelace is in the training data."


def _field_is_missing(fields):
    del fields[sorted(fields)[0]]


def _field_is_null(fields):
    name = next(name for name in sorted(fields) if isinstance(fields[name], str))
    fields[name] = None


def _field_is_nested(fields):
    inner = []
    for _ in range(60):
        inner = [inner]
    fields[sorted(fields)[0]] = inner


INSIDE = {
    way.__name__.strip("_"): way
    for way in (
        _later_version,
        _other_kind,
        _free_text,
        _field_is_missing,
        _field_is_null,
        _field_is_nested,
    )
}
"""What is done to the fields before the step's own key signs them."""


SPELLINGS = {
    "blank": lambda data: data.replace(b'"schema"', b' "schema"', 1),
    "twice": lambda data: data.replace(b"{", b'{"schema": "fedemb/other/1",', 1),
    # A record of the ledger is one line and gets one more.
    "crlf": lambda data: (
        data.replace(b"\n", b"\r\n") if b"\n" in data else data.replace(b",", b",\r\n", 1)
    ),
    "byte_order_mark": lambda data: b"\xef\xbb\xbf" + data,
    "a_list": lambda data: b"[" + data + b"]",
}
"""What is done to the bytes of an honest document."""


def forge(run, name, way):
    """Replaces a document by the forger's text, in one of the ways above."""
    path = path_of(run, name)
    data = path.read_bytes()
    if way in SPELLINGS:
        path.write_bytes(SPELLINGS[way](data))
        return
    fields = json.loads(data)
    role = honest_run.ROLES[fields["schema"].split("/")[1]]
    if way in PUBLIC:
        WISHES[name](fields)
        PUBLIC[way](fields, run=run, role=role, name=name)
    else:
        signature = fields.pop("signature")
        before = copy.deepcopy(fields)
        INSIDE[way](fields)
        assert fields != before
        fields["signature"] = signature
        fields = sign_document(fields, Signer.newest(run.keys, role))
    write_bytes(path, honest_run.spelled(fields))


class Reached(Exception):
    """The step accepted its documents and continued with their content."""


_HEAVY = {
    "partition": (partition_users, partition_users, "commitment_key"),
    "train": (train_model, attempt, "load_backbone"),
    "evaluate": (evaluate_model, evaluate_model, "models_of_run"),
    "audit": (audit_privacy, audit_privacy, "_attack_real_users"),
}


def read_by(run, step, monkeypatch):
    """Lets the real step read its documents; one that would compute ends there with `Reached`."""
    if step not in _HEAVY:
        return getattr(run, f"do_{step}")()
    logic, owner, first = _HEAVY[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, first, _reached)
        return logic.run(run.context())


def _reached(*_, **__):
    raise Reached


@contextmanager
def untouched(run):
    """Whatever was refused left no release, and no record in the ledger."""
    before = run.ledger().head
    yield
    assert not (run.root / "releases").exists()
    assert run.ledger().head == before
