"""The ledger on a folder, moto's S3 and the GCS stand-in, which enforces preconditions."""

import pytest

from fedemb.errors import LedgerError
from fedemb.keys import open_key_store
from fedemb.storage import open_store
from tests.kit import ledger_kit as kit_
from tests.kit.pipeline_runs import ledger_race


@pytest.mark.long
def test_life_of_a_run_is_the_same_on_every_store(store_uri, tmp_path):
    kit = kit_.make(tmp_path, store_uri)
    ledger = kit.open()
    reservation = ledger.reserve(run_id="monday", content=kit_.content())
    assert kit.open().reserve(run_id="monday", content=kit_.content()) == reservation
    kit_.bind(ledger, reservation)
    kit_.commit(kit, ledger, reservation, 3)
    kit.open().verify([reservation.anchor])
    open_store(store_uri).delete("weekly/00000001.json")
    with pytest.raises(LedgerError, match="00000001"):
        kit.open()


@pytest.mark.long
@pytest.mark.parametrize("processes", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_processes_at_once_never_pass_the_cap_on_object_stores(kind, processes, tmp_path, request):
    uri = request.getfixturevalue(f"{kind}_store_uri")
    ledger_race.check(tmp_path, uri, processes)


def test_remote_ledger_is_never_made_by_accident(s3_store_uri, tmp_path):
    from fedemb.privacy.registry import plan_mechanism
    from fedemb.steps.reserve_budget import open_or_create
    from tests.kit.pipeline_runs import honest_run

    run = honest_run.start(tmp_path)
    keys = open_key_store(run.keys_uri)
    with pytest.raises(LedgerError, match="ledger init"):
        open_or_create(s3_store_uri, keys, run.config, plan_mechanism(run.config))
