"""Any byte of any record changed: denied, with the record named. The number tried is printed."""

import dataclasses
import json
import logging
import math
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from fedemb.errors import FedEmbError, LedgerError, SignatureInvalid, StorageError
from fedemb.foundation.canonical_json import canonical_json, sha256_hex
from fedemb.keys.trust import Signer, TrustStore
from fedemb.ledger import Ledger, open_ledger, read_trust
from fedemb.ledger.records import Chain, decode_record
from fedemb.ledger.terms import PolicyTerms
from fedemb.storage import open_store
from tests.kit import ledger_kit
from tests.kit import ledger_kit as kit_


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    kit = kit_.make(tmp_path_factory.mktemp("tampering"))
    ledger = kit.open()
    first = ledger.reserve(run_id="monday", content=kit_.content())
    kit_.bind(ledger, first)
    kit_.commit(kit, ledger, first, 7)
    ledger.reserve(run_id="tuesday", content=kit_.content())
    return kit


def _denied(kit, sequence: int, data: bytes) -> bool:
    original = kit.path(sequence).read_bytes()
    kit.path(sequence).write_bytes(data)
    try:
        kit.reader().verify()
    except FedEmbError as error:
        # The record, or the one after it that no longer follows.
        return any(f"{number:08d}" in str(error) for number in (sequence, sequence + 1))
    finally:
        kit.path(sequence).write_bytes(original)
    return False


def _fuzz(kit, per_record: int) -> tuple[int, int]:
    random = np.random.default_rng(np.random.SeedSequence([4, per_record]))
    tried = denied = 0
    for sequence in range(5):
        original = kit.path(sequence).read_bytes()
        positions = random.permutation(len(original))[:per_record]
        for position in positions:
            changed = bytearray(original)
            changed[position] ^= 1 << int(random.integers(8))
            tried += 1
            denied += _denied(kit, sequence, bytes(changed))
    logging.getLogger(__name__).warning(
        f"{tried} changed bytes tried, {denied} denied with the record named"
    )
    return tried, denied


def test_changed_bytes_are_denied_and_the_record_is_named(kit):
    tried, denied = _fuzz(kit, 60)
    assert tried == denied == 300


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b"\n",
        lambda data: data.replace(b":", b": ", 1),
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data.replace(b'"rounds":20', b'"rounds":20,"rounds":20'),
        lambda data: data.replace(b'"rounds":20', b'"rounds":2e1'),
        lambda data: data.replace(b'"rounds":20', b'"rounds":true'),
        lambda data: data.replace(b'"delta":1e-05', b'"delta":NaN'),
        lambda data: data.replace(b"self_composed", b"os.system"),
        lambda data: b"[" * 100_000,
    ],
)
def test_non_canonical_or_invalid_record_json_is_denied(kit, change):
    original = kit.path(1).read_bytes()
    assert change(original) != original
    assert _denied(kit, 1, change(original))


def test_records_swapped_or_replayed_are_denied(kit):
    first, second = kit.path(3).read_bytes(), kit.path(4).read_bytes()
    assert _denied(kit, 4, first)
    assert _denied(kit, 3, second)
    kit.path(5).write_bytes(second)
    with pytest.raises(FedEmbError, match="00000005"):
        kit.reader()
    kit.path(5).unlink()


@pytest.mark.parametrize("name", ["weekly/00000000.json", "trust.json"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "a device or a pipe"),
        (lambda path: os.truncate(path, 20 << 30), "has more than"),
    ],
    ids=["pipe", "sparse"],
)
def test_ledger_document_that_is_a_pipe_or_too_large_is_refused(tmp_path, name, make, words):
    kit = kit_.make(tmp_path)
    path = Path(kit.ledger_uri, name)
    if make is os.mkfifo:
        path.unlink()
    make(path)
    with pytest.raises(StorageError, match=words):
        open_ledger(kit.ledger_uri, "weekly", trust=read_trust(open_store(kit.ledger_uri)))


def test_signed_record_with_a_wrong_previous_digest_is_denied(tmp_path):
    """The ledger's key signed two branches, and records of one were put behind the other."""
    kit = kit_.make(tmp_path)
    reservation = kit.open().reserve(run_id="monday", content=kit_.content())
    signer, void = Signer.load_or_create(kit.keys, "ledger"), {"reason": "never started"}
    body = {"reservation": reservation.sequence, **void}
    kit_.forge(kit.ledger_uri, signer, "void", body, previous=sha256_hex(b"the other branch"))
    with pytest.raises(LedgerError, match=r"00000002\.json does not follow the record before it"):
        kit.reader()


def test_unpaired_surrogate_in_a_record_is_denied(kit):
    data = kit.path(1).read_bytes().replace(b'"actor":"', b'"actor":"\\ud800')
    for canonical in (True, False):
        with pytest.raises(LedgerError, match=r"is broken: .* is not JSON as we write it"):
            decode_record(data, "weekly/00000001.json", canonical=canonical)


@pytest.mark.parametrize("name", ["²", "99999999999999"])
@pytest.mark.parametrize("folder", ["", "heads"])
def test_files_without_a_record_name_are_ignored(kit, folder, name):
    foreign = kit.path(0).parent / folder / f"{name}.json"
    foreign.write_bytes(b"{}")
    try:
        assert len(kit.reader().chain.records) == 5
    finally:
        foreign.unlink()


def test_signed_head_of_another_policy_is_denied(tmp_path):
    kit = kit_.make(tmp_path)
    other = dataclasses.replace(kit, policy_id="daily")
    other.open().create_policy(kit_.terms(), other.owner)
    for each in (kit, other):
        each.open().reserve(run_id="monday", content=kit_.content())
    head, foreign = (each.path(1).parent / "heads" / "00000001.json" for each in (kit, other))
    shutil.copy(foreign, head)
    with pytest.raises(LedgerError, match="belongs to another policy or record"):
        kit.reader()
    head.unlink()
    head.symlink_to("nowhere")  # listed, and not there
    with pytest.raises(LedgerError, match="although the store lists it"):
        kit.reader()


@pytest.mark.planted_bug(16)
def test_trust_file_with_a_key_that_was_added_later_is_denied(tmp_path):
    kit, stranger = kit_.make(tmp_path / "a"), kit_.make(tmp_path / "b").owner.trusted()
    pinned = dataclasses.replace(kit, policy_id="pinned")
    pinned.open().create_policy(kit_.terms(trust_sha=kit.trust.digest), kit.owner)
    assert pinned.reader().terms.trust_sha == kit.trust.digest
    with pytest.raises(LedgerError, match=r"created with another trust\.json"):
        open_ledger(kit.ledger_uri, "pinned", trust=TrustStore([*kit.trust.keys, stranger]))


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_record_with_a_huge_number_is_a_gap(kit, place):
    store = open_store(kit.ledger_uri)
    store.local_root = store.local_root if place == "folder" else None
    chain = Chain(store, "weekly", kit.trust)
    kit.path(99_999_999).write_bytes(b"{}")
    try:
        with pytest.raises(LedgerError, match=r"00000005\.json is missing while later ones exist"):
            chain.refresh(signatures=False)
    finally:
        kit.path(99_999_999).unlink()
    chain.refresh(signatures=False)
    assert len(chain.records) == 5


def test_ledger_signed_by_another_key_is_denied(kit, tmp_path):
    other = kit_.make(tmp_path)
    other.open().reserve(run_id="monday", content=kit_.content())
    with pytest.raises(FedEmbError, match="does not hold"):
        open_ledger(other.ledger_uri, "weekly", trust=kit.trust)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_rewritten_chain_without_heads_is_denied_by_the_signatures(kit, tmp_path, first):
    """A writer of the store without a key changes a record and links the rest again."""
    shutil.copytree(kit.ledger_uri, tmp_path / "ledger")
    forged = dataclasses.replace(kit, ledger_uri=str(tmp_path / "ledger"))
    shutil.rmtree(forged.path(0).with_name("heads"))
    previous = "0" * 64
    for sequence in range(5):
        record = json.loads(forged.path(sequence).read_bytes())
        record["previous"] = previous
        if sequence == first:
            record["actor"] = "somebody else"
        data = canonical_json(record)
        forged.path(sequence).write_bytes(data)
        previous = sha256_hex(data)
    with pytest.raises(SignatureInvalid, match=f"{first:08d}"):
        open_ledger(forged.ledger_uri, "weekly", trust=kit.trust)


@pytest.mark.planted_bug(16)
@pytest.mark.parametrize(("first", "known_key"), [(0, True), (1, False), (1, True)])
def test_signed_head_covers_only_records_that_its_key_may_sign(kit, tmp_path, first, known_key):
    """A writer with the key of the role `ledger` puts a head over a record without a signature."""
    shutil.copytree(kit.ledger_uri, tmp_path / "ledger")
    forged = dataclasses.replace(kit, ledger_uri=str(tmp_path / "ledger"))
    signer, data = Signer.load_or_create(kit.keys, "ledger"), b""
    for sequence in range(first, 5):
        record = json.loads(forged.path(sequence).read_bytes())
        if sequence == first:
            record["signature"]["value"] = "00" * 64
            record["signature"]["key_id"] = signer.key_id if known_key else "0" * 32
        else:
            del record["signature"]
            record["previous"] = sha256_hex(data)
            record["signature"] = signer.sign(record)
        data = canonical_json(record)
        forged.path(sequence).write_bytes(data)
    (forged.path(0).parent / "heads" / "00000004.json").unlink()
    chain = Chain(open_store(forged.ledger_uri), "weekly", kit.trust)
    chain.write_head(decode_record(data, "weekly/00000004.json"), signer)
    found = (
        nullcontext()
        if first and known_key
        else pytest.raises(SignatureInvalid, match=f"{first:08d}")
    )
    with found:
        assert len(forged.reader().chain.records) == 5
    with pytest.raises(SignatureInvalid, match=f"{first:08d}"):
        Ledger(chain).verify()
    path = forged.path(0).parent / "heads" / "00000004.json"
    head = json.loads(path.read_bytes())
    path.write_bytes(
        canonical_json({**head, "signature": {**head["signature"], "value": "00" * 64}})
    )
    with pytest.raises(SignatureInvalid):  # it replaces signatures only if it is signed
        forged.reader()


# ---- A policy record is read back with terms that can hold, or not at all ----


LEAST = ledger_kit.terms().users_lower_bound


@pytest.mark.parametrize(
    "changes",
    [
        {"renyi_order": 512.0},
        {"renyi_order": math.nextafter(1.0, 2.0)},
        {"delta": math.nextafter(0.0, 1.0)},
        {"delta": math.nextafter(1 / LEAST, 0.0)},
        {"epsilon_cap": math.nextafter(0.0, 1.0)},
        {"approvals": 0},
        {"unit": "image"},
    ],
    ids=str,
)
def test_terms_within_bounds_are_read_back(changes):
    terms = ledger_kit.terms(**changes)
    assert PolicyTerms.from_json(terms.to_json()) == terms


@pytest.mark.parametrize(
    "changes",
    [
        {"renyi_order": math.nextafter(512.0, 513.0)},
        {"renyi_order": 1.0},
        {"renyi_order": math.nan},
        {"delta": 0.0},
        {"delta": -1e-9},
        {"delta": 1 / LEAST},
        {"delta": math.nan},
        {"epsilon_cap": 4},  # of another type than the signed one
        {"epsilon_cap": 0.0},
        {"epsilon_cap": math.inf},
        {"epsilon_cap": math.nan},
        {"approvals": -1},
        {"unit": "household"},
        {"composition": "planned"},
        {"composition": "basic"},
        {"rollback_anchor_sha": "0" * 63},
        {"trust_sha": "G" * 64},
    ],
    ids=str,
)
def test_terms_out_of_bounds_are_refused(changes):
    with pytest.raises(LedgerError, match=r"out of bounds|wrong type"):
        PolicyTerms.from_json(ledger_kit.terms(**changes).to_json())


def test_policy_terms_with_zero_blocks_per_cohort_are_refused():
    body = ledger_kit.terms().to_json()
    body["users"]["blocks_per_cohort"] = 0
    with pytest.raises(LedgerError, match="out of bounds"):
        PolicyTerms.from_json(body)
