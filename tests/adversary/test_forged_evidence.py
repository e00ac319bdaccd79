"""A writer of the public root without a key cannot change a document of a run unseen.

Every forgery is done as well as such a person can: digests that name the document are left to
account_privacy, which runs honestly afterwards.
"""

import json

import forgers
import pytest

from fedemb.errors import ArtifactError, FedEmbError, GateDenied

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
def test_valid_documents_are_accepted_by_every_step(run, step, monkeypatch):
    """Control for the tests above: none of those steps refuses everything."""
    if step in forgers._HEAVY:
        with pytest.raises(forgers.Reached):
            forgers.read_by(run, step, monkeypatch)
    else:
        assert forgers.read_by(run, step, monkeypatch)


def test_replaced_model_or_backbone_is_not_loaded(run, monkeypatch):
    """The documents are honest; the file beside them is another, of constant weights, say."""
    for folder in (run.model, run.root / "pretrained"):
        path = folder / "backbone.keras"
        honest = path.read_bytes()
        path.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
        for step in ("evaluate", "audit"):
            with pytest.raises(ArtifactError, match="not the one its step signed"):
                forgers.read_by(run, step, monkeypatch)
        path.write_bytes(honest)


def test_signed_utility_report_with_inconsistent_gain_is_refused(run):
    """Somebody inside the evaluation: a difference is the difference of what was measured."""
    backbone = json.loads(run.utility.read_text())["public_backbone"]
    backbone["difference"]["0.001"] = {"value": 0.4, "low": 0.3, "high": 0.5}
    run.rewrite(run.utility, public_backbone=backbone)
    with pytest.raises(ArtifactError, match="utility_report"):
        run.do_account()
    with pytest.raises(GateDenied):
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


# ---- An allowed verdict is for one name and version: nothing else is released with it ----


OTHER = ({"release.version": "2"}, {"release.name": "faces"}, {"release.version": None})


@pytest.mark.parametrize("changes", OTHER)
def test_verdict_does_not_allow_another_release_name_or_version(run, changes):
    run.config = run.config.updated(changes)
    with pytest.raises(GateDenied, match="the verdict does not allow the release"):
        run.do_release()
    assert not (run.root / "releases").exists()
