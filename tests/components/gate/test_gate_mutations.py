"""Property: change any field of a good bundle and the gate denies. The numbers are asserted.

The report is signed again after each change, as somebody inside the accounting step could do: the
gate must not need the signature to notice. All other documents carry no signature or one that the
change breaks.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import logging
from datetime import UTC, datetime

import pytest

from fedemb.documents.evidence import read_evidence, read_rounds
from fedemb.documents.plan import check_plan
from fedemb.errors import ArtifactError, FedEmbError, GateDenied
from fedemb.foundation.canonical_json import canonical_json
from fedemb.foundation.document import written
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer, sign_document
from fedemb.release.decide import decide
from fedemb.release.privacy_report import build_report
from tests.kit.pipeline_runs import honest_run

FREE = {("signature",), ("time",)}
"""ReleaseEvidence by rules of their own, below."""


def leaves(value, path=()):
    """Paths of all fields, containers included."""
    items = []
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, child in items:
        yield (*path, key)
        yield from leaves(child, (*path, key))


def mutations(value):  # noqa: PLR0911
    """Other values for a field: type change, nudge, digest flip, wrong words."""
    if isinstance(value, bool):
        return [not value, None, int(value)]
    if isinstance(value, int):
        return [value + 1, -value - 1, float(value) + 0.5, str(value), None, True]
    if isinstance(value, float):
        return [value * 1.001, value / 2, -value, 0, str(value), None]
    if isinstance(value, str):
        flipped = value[:-1] + ("0" if value[-1:] != "0" else "1")
        return [flipped, "", None, 7, [value]]
    if isinstance(value, list):
        return [[], None, {}, [*value, "x"]]
    if isinstance(value, dict):
        return [{}, None, [], {**value, "extra": 1}]
    return [0, "null", False, {}]


def put(document, path, value):
    changed = copy.deepcopy(document)
    node = changed
    for key in path[:-1]:
        node = node[key]
    if value is DROP:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return changed


DROP = object()


def mutate(document):
    """Every mutation of every field: drop and all other values."""
    for path in leaves(document):
        if path[:1] in FREE:
            continue
        node = document
        for key in path:
            node = node[key]
        for value in [DROP, *mutations(node)]:
            if value is DROP or value != node or type(value) is not type(node):
                yield path, put(document, path, value)


NOT_RECOMPUTED = {
    "utility": "measured on held-out people, whom only the evaluation may read",
    "audit self_test": "the test of the auditor itself; its bounds are a rule",
    "start": "compared with the configuration by check_public_backbone; counts of public images",
}
"""Document, and the first field if not all are meant -> why the gate takes its numbers."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["plan", "users", "model", "audit", "utility", "start"])
def test_signed_numbers_are_recomputed_unless_listed_as_exceptions(allowed_run, tmp_path, name):
    """A compromised step signs a number of its choice; account and gate come after it."""
    run = honest_run.copy_of(allowed_run, tmp_path / "run")
    path = run.model / "model.json" if name == "model" else getattr(run, name)
    good, taken = path.read_bytes(), set()
    for place in leaves(json.loads(good)):
        value = functools.reduce(lambda node, key: node[key], place, json.loads(good))
        if isinstance(value, bool) or not isinstance(value, int | float) or 1 in place:
            continue
        changed = put(json.loads(good), place, 2 * value + 1)
        run.rewrite(path, **{key: changed[key] for key in changed if key != "signature"})
        with contextlib.suppress(FedEmbError):
            run.do_account()
            run.do_gate()
            taken |= {name, f"{name} {place[0]}"} & NOT_RECOMPUTED.keys() or {(name, *place)}
    assert taken == {one for one in NOT_RECOMPUTED if one.split()[0] == name}
    path.write_bytes(good)
    run.do_account()
    run.do_gate()


def _write(path, document):
    write_bytes(path, honest_run.spelled(document))


def _write_rounds(run, lines):
    """Lines as a trainer might write them, of the form or not."""
    data = b"".join(canonical_json(line) + b"\n" for line in lines)
    write_bytes(run.model / "rounds.jsonl", data)


def _refused(run) -> bool:
    try:
        run.do_gate()
    except GateDenied:
        verdict = json.loads(run.verdict.read_text())
        return verdict["allow"] is False and len(verdict["reasons"]) > 0
    return False


DOCUMENTS = ["plan", "reservation", "users", "audit", "utility", "model", "report"]


ROLES = {
    "plan": "plan",
    "reservation": "ledger",
    "users": "partition",
    "audit": "audit",
    "utility": "evaluate",
    "model": "trainer",
    "report": "report",
}


def _resigned(run, name, document):
    """A document under its step's own key: only what it says may give it away."""
    return sign_document(document, Signer.newest(run.keys, ROLES[name]))


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_mutations_of_every_document_are_denied(run, name, every):
    """A sample by day, and all at night."""
    path = run.model / "model.json" if name == "model" else getattr(run, name)
    original = path.read_bytes()
    tried, allowed = 0, []
    for position, (field, changed) in enumerate(mutate(json.loads(original))):
        if position % every == 0:
            _write(path, _resigned(run, name, changed))
            tried += 1
            if not _refused(run):
                allowed.append(field)
    path.write_bytes(original)
    logging.getLogger(__name__).warning(
        f"{tried} mutations of {name} tried, {len(allowed)} allowed"
    )
    assert tried > 0
    assert not allowed
    assert run.do_gate()["allow"]


EVIDENCE = [name for name in DOCUMENTS if name != "report"]
OPEN = {"0.001", "1"}
"""Names in dictionaries that are open by nature: rates and depths, which a run may leave out."""


def _allowed_when_priced_again(run, ledger, **bent) -> bool:
    """Whether an honest account_privacy and the gate accept the documents as they are."""
    try:
        evidence = read_evidence(run.config, run.artifacts)
        evidence = dataclasses.replace(evidence, **bent)
        plan = check_plan(evidence.plan.body, evidence.config)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        head = ledger.head.sequence
        report = build_report(evidence, plan, ledger, time=now, head_sequence=head)
    except FedEmbError:
        return False
    signer = Signer.load_or_create(run.keys, "report")
    return decide(evidence, written(report, signer.sign(report.content())), ledger).allow


def _objects(value, path=()):
    """Paths of all JSON objects, the document itself first."""
    if isinstance(value, dict):
        yield path
    for child in leaves(value):
        node = value
        for key in child:
            node = node[key]
        if isinstance(node, dict):
            yield child


@pytest.mark.parametrize("name", EVIDENCE)
def test_added_or_removed_evidence_field_is_denied_despite_valid_accounting(run, name):
    """An unknown field could be a figure without noise, and the gate publishes what it allows."""
    path = run.model / "model.json" if name == "model" else getattr(run, name)
    document = json.loads(path.read_bytes())
    ledger = run.ledger()
    assert _allowed_when_priced_again(run, ledger)
    said = {key: value for key, value in document.items() if key != "signature"}  # signed again
    changes = [((*at, "mean_norm_before_noise"), 0.25) for at in _objects(said)]
    more = len(changes)
    changes += [
        (field, DROP)
        for field in leaves(said)
        if isinstance(field[-1], str) and field[-1] not in OPEN
    ]
    allowed = []
    for field, value in changes:
        _write(path, _resigned(run, name, put(document, field, value)))
        if _allowed_when_priced_again(run, ledger):
            allowed.append(field)
    logging.getLogger(__name__).warning(
        f"{name}: {more} fields added, {len(changes) - more} taken away, {len(allowed)} allowed"
    )
    assert changes[0][0] == ("mean_norm_before_noise",)
    assert not allowed
    _write(path, document)
    assert _allowed_when_priced_again(run, ledger)


def test_every_changed_plan_value_is_denied_despite_valid_accounting(run):
    """The plan's own key signs it: its figures follow from the configuration."""
    ledger, allowed = run.ledger(), []
    for field, changed in mutate(json.loads(run.plan.read_bytes())):
        if field[0] != "signature":
            _write(run.plan, _resigned(run, "plan", changed))
            if _allowed_when_priced_again(run, ledger):
                allowed.append(field)
    assert not allowed


@pytest.mark.parametrize(
    "bend",
    [
        lambda data: data.replace(b'{"clients', b'{"round":17,"clients', 1),
        lambda data: data.replace(b",", b", ", 1),
        lambda data: data + b"\n",
        lambda data: data.removesuffix(b"\n"),
        lambda data: data.replace(b"0.05", b"5e-2", 1),
    ],
    ids=["key twice", "blank", "empty line", "no end", "other spelling"],
)
def test_non_canonical_round_log_is_refused(run, bend):
    path = run.model / "rounds.jsonl"
    data = path.read_bytes()
    path.write_bytes(bend(data))
    assert path.read_bytes() != data
    with pytest.raises(ArtifactError, match="round log"):
        read_rounds(path)
    assert _refused(run)


def test_unnoised_figures_in_round_log_or_model_card_are_denied(tmp_path, monkeypatch):
    """A trainer that logs the number of participants under the name of the event."""
    run = honest_run.start(tmp_path)

    def talkative(lines):
        events = [{k: v for k, v in line.items() if k != "event"} for line in lines]
        _write_rounds(run, [{**line, "realised_clients": 17} for line in events])

    monkeypatch.setattr(run, "write_rounds", talkative)
    run.do("plan reserve partition train measure")
    with pytest.raises(ArtifactError, match="public line of its round"):
        run.do_account()
    with pytest.raises(GateDenied):
        run.do_gate()
    card = json.loads((run.model / "model.json").read_text())
    _write(run.model / "model.json", {**card, "mean_norm_before_noise": 0.25})
    with pytest.raises(ArtifactError, match="model document"):
        run.do_account()
    with pytest.raises(GateDenied):  # no report allows a release
        run.do_gate()
    with pytest.raises(FedEmbError):
        run.do_release()
    assert not (run.root / "releases").exists()
