"""Ledgers of any length, written directly: signing is real, fsync and re-reading are left out."""

import json
from pathlib import Path

from fedemb.keys.trust import Signer, sign_document
from fedemb.ledger import read_reservation
from fedemb.ledger.records import RecordContent, encode_record, record_name
from tests.kit.pipeline_runs import honest_run


def grow(run: honest_run.HonestRun, records: int) -> None:
    """Appends runs (reserve, bind, commit) in full until the ledger has `records` records."""
    reservation = read_reservation(run.reservation)
    ledger = run.ledger()
    signer = Signer.load_or_create(run.keys, "ledger")
    trainer = Signer.load_or_create(run.keys, "trainer")
    reserve = dict(ledger.chain.records[reservation.sequence].body)
    folder = Path(run.ledger_uri)
    sequence, previous = ledger.head.sequence + 1, ledger.head.sha
    number = 0
    while sequence < records:
        number += 1
        run_id, first = f"bulk-{number:05d}", sequence
        log = {
            "schema": "fedemb/round_log/1",
            "card_sha": "0" * 64,
            "run_id": run_id,
            "attempt": 1,
            "rounds_started": 0,
            "sha": "0" * 64,
        }
        bodies = {
            "reserve": reserve,
            "bind": {
                "reservation": first,
                "inputs_sha": "1" * 64,
                "commitments": {},
                "private_root": honest_run.PRIVATE_ROOT,
            },
            "commit": {
                "reservation": first,
                "rounds_started": 0,
                "round_log": sign_document(log, trainer),
            },
        }
        for kind, body in bodies.items():
            data = encode_record(
                RecordContent(
                    policy_id=reservation.policy_id,
                    sequence=sequence,
                    previous=previous,
                    kind=kind,
                    run_id=run_id,
                    attempt=1,
                    time="2026-01-05T00:00:00+00:00",
                    actor="test",
                    body=body,
                ),
                signer,
            )
            (folder / record_name(reservation.policy_id, sequence)).write_bytes(data)
            from fedemb.foundation.canonical_json import sha256_hex

            sequence, previous = sequence + 1, sha256_hex(data)
    assert json.loads(data)["sequence"] == sequence - 1
