"""A writer of the public root without a key cannot change a document of a run unseen.

Every forgery is done as well as such a person can: digests that name the document are left to
account_privacy, which runs honestly afterwards.
"""

import json

import forgers
import pytest

from fedemb.errors import ArtifactError, FedEmbError, GateDenied, SignatureInvalid
from fedemb.foundation.document import encode
from fedemb.foundation.files import write_bytes

FAST = ("kept", "own_key", "other_role", "retired_key", "unsigned", "free_text", "twice")
"""Ways that `make test` tries; `make test-long` tries the others."""
ATTEMPTS = [
    pytest.param(name, way, marks=() if way in FAST else pytest.mark.long)
    for name in forgers.WISHES
    for way in (*forgers.PUBLIC, *forgers.INSIDE, *forgers.SPELLINGS)
]


@pytest.mark.parametrize(("name", "way"), ATTEMPTS)
def test_forged_document_is_refused_by_every_step_that_reads_it(run, name, way, monkeypatch):
    forgers.forge(run, name, way)
    with forgers.untouched(run):
        for step in forgers.READERS[name]:
            with pytest.raises(FedEmbError) as refused:
                forgers.read_by(run, step, monkeypatch)
            assert "\n" not in str(refused.value)
            assert "Lovelace" not in str(refused.value)


@pytest.mark.parametrize("name", forgers.WISHES)
def test_document_of_another_run_is_refused_by_every_step_that_reads_it(
    run, other, name, monkeypatch
):
    """Both runs are honest, and of one policy."""
    forgers.path_of(run, name).write_bytes(forgers.path_of(other, name).read_bytes())
    with forgers.untouched(run):
        for step in forgers.READERS[name]:
            with pytest.raises(FedEmbError):
                forgers.read_by(run, step, monkeypatch)


@pytest.mark.parametrize(
    "step", sorted({step for steps in forgers.READERS.values() for step in steps})
)
def test_honest_documents_are_taken_by_every_step(run, step, monkeypatch):
    """Control for the tests above: none of those steps refuses everything."""
    if step in forgers._HEAVY:
        with pytest.raises(forgers.Reached):
            forgers.read_by(run, step, monkeypatch)
    else:
        assert forgers.read_by(run, step, monkeypatch)


def test_model_or_public_start_that_was_exchanged_is_not_loaded(run, monkeypatch):
    """The documents are honest; the file beside them is another, of constant weights, say."""
    for folder in (run.model, run.root / "pretrained"):
        path = folder / "backbone.keras"
        honest = path.read_bytes()
        path.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
        for step in ("evaluate", "audit"):
            with pytest.raises(ArtifactError, match="not the one its step signed"):
                forgers.read_by(run, step, monkeypatch)
        path.write_bytes(honest)


def _forge(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    write_bytes(path, encode(fields))


def _refused_everywhere(run):
    """Neither priced, nor allowed, nor released."""
    with pytest.raises((SignatureInvalid, ArtifactError)):
        run.do_account()
    with pytest.raises(GateDenied):
        run.do_gate()
    with pytest.raises(FedEmbError):
        run.do_release()
    assert not (run.root / "releases").exists()


def _better(fields):
    for recall in fields["recall_at_far"].values():
        recall.update(value=0.999, low=0.998, high=1.0)
    for difference in fields["public_backbone"]["difference"].values():
        difference.update(value=0.499, low=0.4, high=0.6)


def _sentence(fields):
    fields["sentence"] = "99.9 % of all pairs; Ada Lovelace is in the training data."


def _cover(fields):
    fields["covers"] = "The guarantee covers everybody."


def _person(fields):
    fields["subgroups"]["measured"][0]["name"] = "Ada Lovelace"


def _seen_by_the_attack(fields):
    fields["self_test"]["planted_leak"] = {"value": 0.5, "low": 0.4, "high": 0.6}


def _fewer_users(fields):
    fields["users_at_most"] = 1


def _passed(fields):
    fields["self_test"]["passed"] = True


def _projection(fields):
    fields["epsilon_rdp"] = 0.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("utility", _better),
        ("utility", _sentence),
        ("utility", _cover),
        ("utility", _person),
        ("audit", _seen_by_the_attack),
        ("audit", _fewer_users),
        ("audit", _sentence),
        ("audit", _passed),
        ("plan", _projection),
    ],
    ids=lambda item: getattr(item, "__name__", item),
)
def test_forged_document_is_refused_by_account_gate_and_release(run, name, change):
    _forge(getattr(run, name), change)
    _refused_everywhere(run)


@pytest.mark.parametrize("name", ["plan", "users", "audit", "utility"])
def test_document_without_its_signature_or_under_that_of_another_step_is_refused(run, name):
    path = getattr(run, name)
    signature = json.loads(run.report.read_text())["signature"]
    for stolen in (None, signature):
        _forge(path, lambda fields, stolen=stolen: fields.update(signature=stolen))
        _refused_everywhere(run)


def test_audit_that_contradicts_its_own_figures_is_denied_whoever_signs_it(run):
    """Somebody inside the audit step: that the auditor passed follows from what it saw."""
    blind = json.loads(run.audit.read_text())["self_test"]
    blind["planted_leak"] = {"value": 0.5, "low": 0.4, "high": 0.6}
    run.rewrite(run.audit, self_test=blind)
    run.do_account()
    with pytest.raises(GateDenied, match="planted_leak"):
        run.do_gate()


def test_utility_whose_gain_is_not_that_of_its_figures_is_not_read_whoever_signs_it(run):
    """Somebody inside the evaluation: a difference is the difference of what was measured."""
    backbone = json.loads(run.utility.read_text())["public_backbone"]
    backbone["difference"]["0.001"] = {"value": 0.4, "low": 0.3, "high": 0.5}
    run.rewrite(run.utility, public_backbone=backbone)
    with pytest.raises(ArtifactError, match="utility_report"):
        run.do_account()
    with pytest.raises(GateDenied):
        run.do_gate()


@pytest.mark.parametrize(
    "change",
    [
        {"embedding_space_id": "es-" + "0" * 20},
        {"public_kind": "supervised"},
        {"bootstrap": {"samples": 1, "unit": "user", "groups": None}},
        {"bootstrap": {"samples": 200, "unit": "user", "groups": 5}},
        {"headline_rate": "0.01"},
    ],
    ids=str,
)
def test_utility_that_was_measured_otherwise_is_denied_whoever_signs_it(run, change):
    run.rewrite(run.utility, **change)
    run.do_account()
    with pytest.raises(GateDenied, match="utility report belongs to another"):
        run.do_gate()


def test_evidence_has_no_field_for_free_text():
    """What is published word for word may say only what a schema bounds: no sentence fits."""
    from tests.kit.document_kinds import all_documents, json_schema

    def texts(node, path=()):
        if isinstance(node, dict):
            bounded = {"pattern", "enum", "const"} & node.keys()
            if node.get("type") == "string" and not bounded and path[-1] != "signature":
                yield path, node.get("maxLength", 0)
            for key, child in node.items():
                yield from texts(child, (*path, key))

    free = {
        (document.kind, path[-1] if path[-2] == "properties" else path[-2])
        for document in all_documents()
        if document.kind != "public_backbone"  # the card of a public file, no evidence of a run
        for path, _ in texts(json_schema(document))
        if "signature" not in path
    }
    # Addresses: of the input, as the ledger binds it, and of the release, in the private result.
    assert free <= {
        ("ledger_record", "input"),
        ("privacy_report", "input"),
        ("release", "uri"),
        ("release", "anyOf"),
    }
