"""Property: change any field of a good bundle and the gate denies. The numbers are asserted.

The report is signed again after each change, as somebody inside the accounting step could do: the
gate must not need the signature to notice. All other documents carry no signature or one that the
change breaks.
"""

import copy
import json
import logging
import math

import pytest

from components.fedemb.artifacts import write_bytes
from components.fedemb.errors import GateDenied
from components.fedemb.evidence import read_document, read_evidence
from components.fedemb.gate.decide import decide
from components.fedemb.privacy.signatures import Signer, sign_document

FREE = {("signature",), ("time",)}
"""Judged by rules of their own, below."""


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


def test_every_mutation_of_a_resigned_report_is_denied(good_run):
    evidence = read_evidence(good_run.config, **good_run.evidence_paths())
    report = dict(read_document(good_run.report, "report").body)
    ledger = good_run.ledger()
    signer = Signer.load_or_create(good_run.keys, "report")
    assert decide(evidence, report, ledger).allow
    tried, allowed = 0, []
    for path, changed in mutate(report):
        tried += 1
        if decide(evidence, sign_document(changed, signer), ledger).allow:
            allowed.append(path)
    logging.getLogger(__name__).warning(
        f"{tried} mutations of a report signed again tried, {len(allowed)} allowed"
    )
    assert not allowed
    assert tried > 700, f"{tried} mutations of the report tried"


def _write(path, document):
    text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False)
    write_bytes(path, text.encode() + b"\n")


def _refused(run) -> bool:
    try:
        run.do_gate()
    except GateDenied:
        verdict = json.loads(run.verdict.read_text())
        return verdict["allow"] is False and len(verdict["reasons"]) > 0
    return False


DOCUMENTS = ["plan", "reservation", "users", "audit", "utility", "model", "report"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sampled_mutations_of_every_document_are_denied(run, name):
    _check_documents(run, name, every=17)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_mutation_of_every_document_is_denied(run, name):
    _check_documents(run, name, every=1)


def _check_documents(run, name, every):
    path = run.model / "model.json" if name == "model" else getattr(run, name)
    original = path.read_bytes()
    tried, allowed = 0, []
    for position, (field, changed) in enumerate(mutate(json.loads(original))):
        if position % every == 0:
            _write(path, changed)
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


@pytest.mark.parametrize("name", [*DOCUMENTS, "rounds", "weights"])
def test_any_changed_byte_of_any_file_is_denied(run, name):
    import numpy as np

    path = {
        "model": run.model / "model.json",
        "rounds": run.model / "rounds.jsonl",
        "weights": run.model / "backbone.keras",
    }.get(name) or getattr(run, name)
    original = path.read_bytes()
    random = np.random.default_rng(np.random.SeedSequence([9, len(original)]))
    for position in random.permutation(len(original))[:12]:
        changed = bytearray(original)
        changed[position] ^= 1 << int(random.integers(8))
        path.write_bytes(bytes(changed))
        assert _refused(run), f"byte {position} of {name}"
    path.write_bytes(original)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_denied(run, text):
    report = json.loads(run.report.read_text())
    epsilon = json.dumps(report["accounting"]["epsilon"])
    run.report.write_text(run.report.read_text().replace(epsilon, text))
    assert _refused(run)


def test_nan_in_any_number_of_the_report_denies(good_run):
    evidence = read_evidence(good_run.config, **good_run.evidence_paths())
    report = dict(read_document(good_run.report, "report").body)
    ledger = good_run.ledger()
    numbers = 0
    for path in leaves(report):
        node = report
        for key in path:
            node = node[key]
        if isinstance(node, float):
            numbers += 1
            bent = put(report, path, math.nan)
            assert not decide(evidence, bent, ledger).allow
    assert numbers > 20
